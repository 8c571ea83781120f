"""Which variable of tower 0 a replica's variable is a copy of.

Imports the private plan: through builders its properties cannot be generated.
"""

from hypothesis import given
from hypothesis import strategies as st

from tw_builders._sync_variables import VariableFacts, originals_by_name, plan_sync

PART = st.sampled_from(["w", "b", "layer", "Adam", "towers", "tower", "nottower1"])
PATHS = st.lists(PART, min_size=1, max_size=3).map("/".join)


def facts(name, original=None, shape="()", dtype="float32"):
    return VariableFacts(name, shape, dtype, original)


def test_copies_find_their_originals():
    variables = [facts("w"), facts("x", "b"), facts("b"), facts("y", "w")]
    assert plan_sync(variables).copies == ((2, 1), (0, 3))
    assert plan_sync(variables).unmatched == ()


def test_nothing_is_copied_onto_what_is_no_copy():
    variables = [facts("tower1/w"), facts("w"), facts("tower1/tower1/w", "tower1/w")]
    assert plan_sync(variables).copies == ((0, 2),)


def test_a_copy_is_no_original():
    variables = [facts("tower1/w", "w"), facts("tower2/w", "tower1/w")]
    assert plan_sync(variables).unmatched == (0, 1)


def test_another_shape_or_dtype_is_no_original():
    copies = [facts("a", "w", shape="(2,)"), facts("b", "w", dtype="float16")]
    plan = plan_sync([facts("w"), *copies])
    assert plan.copies == ()
    assert plan.unmatched == (1, 2)


@given(st.lists(PATHS, unique=True, max_size=6), st.integers(1, 12))
def test_by_name_every_local_copy_finds_the_variable_of_its_name(paths, tower):
    copies = [f"tower{tower}/{path}" for path in paths]
    assert originals_by_name(paths, copies) == dict(zip(copies, paths, strict=True))


@given(st.lists(PATHS, unique=True, max_size=6))
def test_by_name_a_global_variable_is_no_copy(paths):
    models = [*paths, *(f"tower1/{path}" for path in paths)]
    copies = [f"tower1/{path}" for path in models]
    assert originals_by_name(models, copies) == dict(zip(copies, models, strict=True))


def test_by_name_global_variables_count_where_no_local_one_is_a_copy():
    assert originals_by_name(["w", "tower1/w"], ["b"]) == {"tower1/w": "tower1/w"}


def test_by_name_two_that_may_be_the_original_are_none():
    name = "tower2/tower2/w"
    assert originals_by_name(["tower0/w", "tower1/w"], [name]) == {name: name}


def test_by_name_a_moving_average_below_two_tower_scopes_finds_its_original():
    name = "tower1/tower1/w/average"
    assert originals_by_name(["w/average"], [name]) == {name: "w/average"}


def test_by_name_tower_0_may_have_named_its_variable_by_its_scope():
    name = "tower1/Adam/tower1/w/m"
    found = originals_by_name(["tower0/v", "Adam/tower0/w/m"], ["tower1/v", name])
    assert found == {"tower1/v": "tower0/v", name: "Adam/tower0/w/m"}


def test_by_name_a_scope_of_the_model_stays():
    found = originals_by_name(["tower1/w"], ["tower1/tower1/w"])
    assert found == {"tower1/tower1/w": "tower1/w"}


def test_by_name_a_copy_without_an_original_is_its_own():
    assert originals_by_name([], ["tower1/only"]) == {"tower1/only": "tower1/only"}


def test_by_name_what_only_begins_like_a_tower_is_no_copy():
    assert originals_by_name(["w"], ["tower1x/w", "tower/w", "nottower1/w"]) == {}

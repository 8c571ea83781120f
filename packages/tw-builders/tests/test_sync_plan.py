"""Which variable of tower 0 a replica's variable is a copy of."""

from hypothesis import given
from hypothesis import strategies as st

from tw_builders._sync_plan import VariableFacts, plan_sync

PART = st.sampled_from(["w", "b", "layer", "Adam", "towers", "tower", "nottower1"])
PATHS = st.lists(PART, min_size=1, max_size=3).map("/".join)


def facts(*names, shape="()", dtype="float32"):
    return [VariableFacts(name, shape, dtype) for name in names]


@given(st.lists(PATHS, unique=True, max_size=6), st.integers(1, 12))
def test_every_copy_finds_the_variable_of_its_name(paths, tower):
    plan = plan_sync(facts(*paths, *(f"tower{tower}/{path}" for path in paths)))
    count = len(paths)
    assert plan.copies == tuple((i, i + count) for i in range(count))
    assert plan.unmatched == ()


@given(st.lists(PATHS, unique=True, min_size=1, max_size=6))
def test_copies_without_an_original_are_unmatched(paths):
    plan = plan_sync(facts(*(f"tower2/{path}" for path in paths)))
    assert plan.copies == ()
    assert plan.unmatched == tuple(range(len(paths)))


def test_a_moving_average_below_two_tower_scopes_finds_its_original():
    plan = plan_sync(facts("w/average", "tower1/tower1/w/average"))
    assert plan.copies == ((0, 1),)


def test_a_variable_named_by_the_name_scope_of_tower_0_is_an_original():
    plan = plan_sync(facts("tower0/v:0", "tower1/v:0"))
    assert plan.copies == ((0, 1),)


def test_slots_named_by_the_scopes_of_both_towers_belong_together():
    plan = plan_sync(facts("Adam/tower0/w/m", "tower1/Adam/tower1/w/m"))
    assert plan.copies == ((0, 1),)


def test_a_name_of_get_variable_goes_before_one_of_the_name_scope():
    assert plan_sync(facts("tower0/w", "w", "tower1/w")).copies == ((1, 2),)
    assert plan_sync(facts("w", "tower0/w", "tower1/w")).copies == ((0, 2),)


def test_another_shape_or_dtype_is_no_original():
    copies = facts("tower1/w", shape="(2,)") + facts("tower2/w", dtype="float16")
    plan = plan_sync(facts("w") + copies)
    assert plan.copies == ()
    assert plan.unmatched == (1, 2)


def test_a_name_that_only_begins_like_a_tower_is_an_original():
    plan = plan_sync(facts("tower1x/w", "tower/w", "nottower1/w"))
    assert plan.copies == ()
    assert plan.unmatched == ()

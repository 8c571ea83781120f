"""Which variable of tower 0 a replica's variable is a copy of.

Imports the private plan: through builders its properties cannot be generated.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_builders._session.sync_variables import (
    VariableFacts,
    originals_by_name,
    plan_sync,
)

PART = st.sampled_from(["w", "b", "layer", "Adam", "towers", "tower", "nottower1"])
PATHS = st.lists(PART, min_size=1, max_size=3).map("/".join)


def facts(name, original=None, kind="float32"):
    return VariableFacts(name, kind, original)


@pytest.mark.parametrize(
    ("variables", "copies", "unmatched"),
    [
        (
            [facts("w"), facts("x", "b"), facts("b"), facts("y", "w")],
            [(2, 1), (0, 3)],
            [],
        ),
        (  # nothing is copied onto what is no copy
            [facts("tower1/w"), facts("w"), facts("tower1/tower1/w", "tower1/w")],
            [(0, 2)],
            [],
        ),
        # A copy is no original, nor is a variable of another shape or dtype.
        ([facts("tower1/w", "w"), facts("tower2/w", "tower1/w")], [], [0, 1]),
        ([facts("w"), facts("a", "w", kind="float16")], [], [1]),
    ],
)
def test_copies_find_their_originals(variables, copies, unmatched):
    assert plan_sync(variables) == (copies, unmatched)


@given(st.lists(PATHS, unique=True, max_size=6), st.integers(1, 12))
def test_by_name_every_local_copy_finds_the_variable_of_its_name(paths, tower):
    copies = [f"tower{tower}/{path}" for path in paths]
    assert originals_by_name(paths, copies) == dict(zip(copies, paths, strict=True))


@given(st.lists(PATHS, unique=True, max_size=6))
def test_by_name_a_global_variable_is_no_copy(paths):
    models = [*paths, *(f"tower1/{path}" for path in paths)]
    copies = [f"tower1/{path}" for path in models]
    assert originals_by_name(models, copies) == dict(zip(copies, models, strict=True))


@pytest.mark.parametrize(
    ("known", "local", "originals"),
    [
        # Global variables count where no local one is a copy.
        (["w", "tower1/w"], ["b"], {"tower1/w": "tower1/w"}),
        # Two that may be the original are none.
        (
            ["tower0/w", "tower1/w"],
            ["tower2/tower2/w"],
            {"tower2/tower2/w": "tower2/tower2/w"},
        ),
        # A moving average below two tower scopes.
        (
            ["w/average"],
            ["tower1/tower1/w/average"],
            {"tower1/tower1/w/average": "w/average"},
        ),
        # Tower 0 may have named its variable by its scope.
        (
            ["tower0/v", "Adam/tower0/w/m"],
            ["tower1/v", "tower1/Adam/tower1/w/m"],
            {"tower1/v": "tower0/v", "tower1/Adam/tower1/w/m": "Adam/tower0/w/m"},
        ),
        # A scope of the model stays.
        (["tower1/w"], ["tower1/tower1/w"], {"tower1/tower1/w": "tower1/w"}),
        # A copy without an original is its own.
        ([], ["tower1/only"], {"tower1/only": "tower1/only"}),
        # A local variable of tower 0 is no copy, nor what only begins like a tower.
        (["w"], ["tower0/w", "tower1/w"], {"tower1/w": "w"}),
        (["w"], ["tower1x/w", "tower/w", "nottower1/w"], {}),
    ],
)
def test_by_name_copies_find_their_originals(known, local, originals):
    assert originals_by_name(known, local) == originals

"""Ranks whose data ends before that of others, against one process with all rows."""

import numpy as np
import pytest
from ranks import Raised, Ranks

# Rows per batch, by rank; quarters, so that all means are exact.
DATA = [
    [[4.0, 8.0], [0.0, 4.0], [8.0, 8.0, 4.0, 4.0]],
    [[0.0, 4.0]],
    [[4.0, 4.0, 0.0, 8.0], [8.0, 0.0]],
]


def alone(steps):
    """What one process comes to with all rows of each step."""
    weight, values = 0.0, []
    for step in range(steps):
        rows = [row for own in DATA for row in (own[step] if step < len(own) else [])]
        weight -= 0.5 * np.mean([weight - row for row in rows])
        values.append(weight)
    return values


@pytest.fixture(scope="module")
def ranks(processes):
    group = Ranks(processes, 3).joined()
    yield group
    group.end()


def test_the_mean_is_over_those_that_came(ranks):
    calls = [(DATA[rank.rank], "finish") for rank in ranks.all]
    results = ranks.call_each("train_unevenly", calls)
    for own, (values, taken) in zip(DATA, results, strict=True):
        np.testing.assert_allclose(values, alone(3)[: len(own)], rtol=1e-6)
        assert taken == 3 - len(own)


def test_a_second_run_finishes_as_the_first(ranks):
    test_the_mean_is_over_those_that_came(ranks)


def test_the_run_can_end_at_the_first_end(ranks):
    calls = [(DATA[rank.rank], "first end") for rank in ranks.all]
    for values, _ in ranks.call_each("train_unevenly", calls):
        np.testing.assert_allclose(values, alone(1), rtol=1e-6)
    # The next sums are in step.
    assert ranks.call("step_until", 2) == [6, 6, 6]


def test_a_rank_that_never_trained_cannot_take_part(make_ranks):
    group = make_ranks(2).joined()
    group.all[1].say("train_unevenly", [], "finish")
    with pytest.raises(
        Raised, match=r"finish: this rank has not traced a training step"
    ):
        group.all[1].hear()

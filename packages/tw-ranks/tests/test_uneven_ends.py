"""Ranks whose data ends before that of others, against one process with all rows."""

import numpy as np
import pytest
from harness.ranks import Raised, Ranks

# Rows per batch, by rank; quarters, so that all means are exact. The batches of step 1
# are empty on the ranks that have one, which must not pass for the end of all data.
DATA = [
    [[4.0, 8.0], [], [0.0, 4.0], [8.0, 8.0, 4.0, 4.0]],
    [[0.0, 4.0]],
    [[4.0, 4.0, 0.0, 8.0], [], [8.0, 0.0]],
]


def alone(steps):
    """What one process comes to with all rows of each step."""
    weight, values = 0.0, []
    for step in range(steps):
        rows = [row for own in DATA for row in (own[step] if step < len(own) else [])]
        weight -= 0.5 * np.mean([weight - row for row in rows] or [0.0])
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
        np.testing.assert_allclose(values, alone(4)[: len(own)], rtol=1e-6)
        assert taken == 4 - len(own)


def test_a_second_run_finishes_as_the_first(ranks):
    test_the_mean_is_over_those_that_came(ranks)


def test_the_run_can_end_at_the_first_end(ranks):
    calls = [(DATA[rank.rank], "first end") for rank in ranks.all]
    for values, _ in ranks.call_each("train_unevenly", calls):
        np.testing.assert_allclose(values, alone(1), rtol=1e-6)
    # The next sums are in step.
    assert ranks.call("step_until", 2) == [6, 6, 6]


# Rows, and the length of the gradient whose shape is not known; rank 1 has no data, and
# in step 1 nobody has rows.
BATCHES = [
    [([1.0, 2.0], 3), ([], 40), ([3.0], 40), ([4.0, 1.0, 1.0], 3)],
    [],
    [([5.0], 3), ([], 40), ([2.0, 6.0], 40)],
]


@pytest.mark.parametrize(
    ("mode", "wire"),
    [("function", None), ("function", "bfloat16"), ("eager", None), ("session", None)],
)
def test_a_rank_without_any_batch_takes_part(ranks, mode, wire):
    calls = [(own, mode, wire) for own in BATCHES]
    for own, (results, taken) in zip(
        BATCHES, ranks.call_each("reduce_unevenly", calls), strict=True
    ):
        assert len(results) == len(own)
        assert taken == 4 - len(own)
        for step, got in enumerate(results):
            came = [other[step] for other in BATCHES if step < len(other)]
            rows = [np.array(batch[0], np.float32) for batch in came]
            count = sum(map(len, rows))
            mean = sum(len(r) * r.sum() for r in rows) / max(count, 1)
            shares = np.concatenate([len(r) * r[:, None] for r in rows]) / max(count, 1)
            tolerance = 2**-7 if wire else 1e-6
            np.testing.assert_allclose(
                got[0], np.full([came[0][1]], mean), rtol=tolerance
            )
            np.testing.assert_allclose(got[1], shares, rtol=tolerance)
            np.testing.assert_array_equal(got[2], np.concatenate(rows))
            np.testing.assert_allclose(got[3], mean, rtol=1e-6)
            assert got[4] == count


def test_ranks_that_all_have_no_batch_finish_at_once(make_ranks):
    group = make_ranks(2).joined()
    assert group.call("reduce_unevenly", [], "function", None) == [([], 0)] * 2
    assert group.call("step_until", 2) == [4, 4]


@pytest.mark.parametrize("mode", ["new", "eager", "function", "session"])
def test_what_a_rank_without_data_cannot_take_part_in_ends_at_once(make_ranks, mode):
    group = make_ranks(2, timeout_s=120.0).joined()
    for rank, is_done in zip(group.all, (False, True), strict=True):
        rank.say("broadcast_or_finish", mode, is_done)
    is_compared = mode in ("new", "eager")  # eager broadcasts are, each time
    what = "'a broadcast'" if is_compared else "a collective"
    named = (
        rf"rank 1 \(.*\) has no more data \(finish, hvd.join\) .*; rank 0 has reached "
        rf"{what}, which needs all ranks"
    )
    with pytest.raises(Raised, match=named):
        group.all[0].hear(30)
    own = "finish: other ranks have reached 'a broadcast'" if is_compared else named
    with pytest.raises(Raised, match=own):
        group.all[1].hear(30)

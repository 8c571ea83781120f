"""Reducers with memory between processes: as one process with all of their towers."""

import numpy as np
import pytest
from programs import rank_memory

pytestmark = pytest.mark.slow

STEPS = 5
NOT_IN_PARTS = ("drawn", "power_sgd", "parts")


over_groups = pytest.mark.parametrize(
    ("size", "engine"), [(2, ""), (2, "mpi"), (3, "")], ids=["two", "mpi", "three"]
)


@over_groups
@pytest.mark.parametrize("num_towers", [1, 2])
def test_ranks_reduce_as_one_process_with_all_towers(groups, size, engine, num_towers):
    results = groups(size, engine).call("rank_memory:reduced", num_towers, STEPS)
    towers = len(results) * num_towers
    alone = rank_memory.reduced(None, towers, STEPS)
    every = [
        rank_memory.gradients(n, k)[0] for n in range(STEPS) for k in range(towers)
    ]
    for name, (wanted, errors, sent, total) in alone.items():
        # What was not sent is remembered.
        np.testing.assert_allclose(total + errors, sum(every), atol=1e-4, err_msg=name)
        kept = sum(own[name][1] for own in results)
        np.testing.assert_allclose(kept, errors, atol=1e-4, err_msg=name)
        for sums, _, told, _ in (own[name] for own in results):
            assert told == sent
            assert len(sums) == num_towers
            for tower in sums:
                for got, want, same in zip(
                    tower, wanted[0], results[0][name][0][0], strict=True
                ):
                    np.testing.assert_allclose(got, want, atol=1e-4, err_msg=name)
                    np.testing.assert_array_equal(got, same, err_msg=name)


@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("engine", ["", "mpi"])
def test_ranks_that_exchange_parts_lose_nothing(groups, engine, mode):
    if mode == "session":
        results = groups(3, engine).call("rank_memory:reduced_in_session", STEPS)
    else:
        results = groups(3, engine).call("rank_memory:reduced", 1, STEPS, True)
    every = [rank_memory.gradients(n, k)[0] for n in range(STEPS) for k in range(3)]
    for name, (_, _, sent, total) in results[0].items():
        kept = sum(own[name][1] for own in results)
        np.testing.assert_allclose(total + kept, sum(every), atol=1e-4, err_msg=name)
        assert ("in parts" in sent) == (name not in NOT_IN_PARTS)
        for sums, _, _, _ in (own[name] for own in results[1:]):
            np.testing.assert_equal(sums, results[0][name][0])


@pytest.mark.parametrize("in_parts", [False, True])
@over_groups
def test_one_ranks_infinity_leaves_the_memory_of_all(groups, size, engine, in_parts):
    results = groups(size, engine).call("rank_memory:overflowing", in_parts)
    for is_same, are_finite, were_finite in results:
        assert is_same
        assert all(were_finite)
        assert not all(are_finite)

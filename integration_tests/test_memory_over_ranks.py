"""Reducers with memory between processes: as one process with all of their towers."""

import numpy as np
import pytest
import random_compressors
import rank_memory
from harness.ranks import Ranks

STEPS = 5


GROUPS = {"two": (2, ""), "mpi": (2, "mpi"), "three": (3, "")}


@pytest.fixture(scope="module", params=GROUPS)
def ranks(request, processes):
    size, engine = GROUPS[request.param]
    with Ranks(processes, size, towers=2, engine=engine) as group:
        yield group.joined()


@pytest.mark.full("two-2")
@pytest.mark.parametrize("num_towers", [1, 2])
def test_ranks_reduce_as_one_process_with_all_towers(ranks, num_towers):
    results = ranks.call("rank_memory:reduced", num_towers, STEPS)
    alone = rank_memory.reduced(None, len(results) * num_towers, STEPS)
    for name, (wanted, errors, sent) in alone.items():
        kept = sum(own[name][1] for own in results)
        np.testing.assert_allclose(kept, errors, atol=1e-4, err_msg=name)
        for sums, _, told in (own[name] for own in results):
            assert told == sent
            assert len(sums) == num_towers
            for tower in sums:
                for got, want, same in zip(
                    tower, wanted[0], results[0][name][0][0], strict=True
                ):
                    np.testing.assert_allclose(got, want, atol=1e-4, err_msg=name)
                    np.testing.assert_array_equal(got, same, err_msg=name)


@pytest.mark.full("two-0", "mpi-1")
@pytest.mark.parametrize("number", range(6))
def test_ranks_send_what_compressors_of_ones_own_like(ranks, number):
    num_towers, seed = 1 + number % 2, f"ranks {number}"
    results = ranks.call("rank_memory:randomly_compressed", num_towers, seed)
    wanted = random_compressors.modelled(seed, len(results) * num_towers, 2)
    for steps in results:
        for sums, want in zip(steps, wanted, strict=True):
            for tower in sums:
                for own, whole in zip(tower, want, strict=True):
                    np.testing.assert_array_equal(own, whole)


def test_one_ranks_infinity_leaves_the_memory_of_all(ranks):
    for is_same, are_finite, were_finite in ranks.call("rank_memory:overflowing"):
        assert is_same
        assert all(were_finite)
        assert not all(are_finite)

"""Keras's ``fit`` over processes and towers gives what one device gives."""

import numpy as np
import pytest
import rank_fits
from harness.ranks import Raised, Ranks

SHAPES = [(2, 1), (2, 2), (3, 1)]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, processes):
    with Ranks(processes, request.param, towers=8) as group:
        yield group.joined()


@pytest.fixture(scope="module")
def two_ranks(processes):
    with Ranks(processes, 2, towers=8) as group:
        yield group.joined()


def assert_alike(results, want, rtol=2e-6):
    for got in results:
        for one, other in zip(got, want, strict=True):
            if isinstance(one, dict):
                assert one.keys() == other.keys()
                one, other = list(one.values()), list(other.values())
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol, rtol / 2)
    for got in results[1:]:
        for one, other in zip(got[1], results[0][1], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.full(
    *("2-Adam", "2-sharded", "2-losses added", "2-accumulated", "2-eagerly", "2-early"),
    *("2-several steps in one call", "2-rates", "2-two optimizers"),
    *("2-overflowing losses", "2-accumulated, scaled", "3-accumulated, shared"),
    *("3-sparse gradients", "3-flat", "3-shared variables", "3-scaled losses"),
    "3-averages, sharded",
)
@pytest.mark.parametrize("name", rank_fits.CASES)
def test_a_fit_is_that_of_one_device(ranks, name):
    towers = 2 if len(ranks.all) == 2 else 1
    results = ranks.call("rank_fits:fit", name, towers)
    rtol = rank_fits.CASES[name].get("rtol", 2e-6)
    assert_alike(results, rank_fits.fit(None, name, 1), rtol)


@pytest.mark.parametrize("towers", [1, 2])
def test_shared_data_gives_the_history_of_one_device(two_ranks, towers):
    results = two_ranks.call("rank_fits:fit", "Adam", towers, "shared")
    assert_alike(results, rank_fits.fit(None, "Adam", 1))


@pytest.mark.full(
    *("wait-2", "wait, two optimizers-1", "unknown-2", "none-1", "stop-1"),
    *("accumulated-2", "accumulated, none at the end-1"),
)
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("name", rank_fits.UNEVEN)
def test_ranks_may_have_unlike_numbers_of_batches(two_ranks, name, towers):
    results = two_ranks.call("rank_fits:uneven", name, towers)
    assert_alike(results, rank_fits.uneven(None, name, 1))


def test_ranks_exchange_accumulated_gradients_once_per_update(two_ranks):
    # Of eight batches, in groups of three.
    for looks, count in [(False, 2), (True, 8)]:
        want = rank_fits.exchanged(None, looks)
        for rank, got in enumerate(two_ranks.call("rank_fits:exchanged", looks)):
            assert got[0] == count
            # A callback of one rank sees what one device has between batches.
            pairs = [(got[1], want[1]), *zip(got[2], want[2], strict=False)]
            assert len(pairs) == (9 if looks and rank == 1 else 1)
            for own, plain in pairs:
                for a, b in zip(own, plain, strict=True):
                    np.testing.assert_allclose(a, b, 2e-6, 2e-7)


@pytest.mark.parametrize(
    ("variables", "towers"),
    [("replicated", 1), ("sharded", 2), ("parameter_server", 2)],
)
def test_rank_0_may_load_the_model_that_others_build(
    two_ranks, tmp_path, variables, towers
):
    rank_fits.seeded(rank_fits.dense, 3)().save(tmp_path / "model.keras")
    arguments = "rank_fits:resumed", str(tmp_path), variables, towers
    results = two_ranks.call(*arguments)
    assert_alike(results, rank_fits.resumed(None, *arguments[1:]))


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_stop_where_one_asks(two_ranks, rank):
    # Asked after the second batch of four, heard with the third.
    assert two_ranks.call("rank_fits:stop", "batch", rank) == [(1, 3)] * 2
    assert two_ranks.call("rank_fits:stop", "epoch", rank) == [(2, 8)] * 2


def test_rank_0_alone_writes(two_ranks, tmp_path):
    first, second = two_ranks.call("rank_fits:shuffled", str(tmp_path))
    assert first[0] == second[0]
    for one, other in zip(first[1], second[1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert (first[2], second[2]) == ([0, 1], [])
    assert first[3] and second[3]
    own = ["model.keras", "rank0.csv", "rank0/1.weights.h5", "rank0/2.weights.h5"]
    assert first[4] == own


def test_different_data_is_refused(two_ranks):
    with pytest.raises(Raised, match="all ranks must get the same batches"):
        two_ranks.call("rank_fits:different_data")

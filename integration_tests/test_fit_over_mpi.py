"""Keras's ``fit`` of a ``TowerModel`` over MPI gives what one device gives."""

import pytest
import rank_fits
from test_fit_over_ranks import Ranks, assert_alike

pytest.importorskip("mpi4py")
CASES = ["Adam", "sparse gradients", "flat", "two optimizers"]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, processes):
    with Ranks(processes, request.param, engine="mpi", towers=8) as group:
        yield group.joined()


@pytest.mark.full("3-flat", "3-two optimizers")
@pytest.mark.parametrize("name", CASES)
def test_a_fit_over_mpi_is_that_of_one_device(ranks, name):
    towers = 2 if len(ranks.all) == 2 else 1
    results = ranks.call("rank_fits:fit", name, towers)
    assert_alike(results, rank_fits.fit(None, name, 1))


def test_ranks_may_have_unlike_numbers_of_batches(ranks):
    if len(ranks.all) != 2:
        pytest.skip("the data is for two ranks")
    for name in rank_fits.UNEVEN:
        results = ranks.call("rank_fits:uneven", name, 1)
        assert_alike(results, rank_fits.uneven(None, name, 1))

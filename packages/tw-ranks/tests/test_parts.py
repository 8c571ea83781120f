"""Parts that one rank each adds up and gives to all, against NumPy."""

from importlib.util import find_spec

import numpy as np
import pytest
from harness.ranks import Raised, Ranks

ENGINES = ["tensorflow", *(["mpi"] if find_spec("mpi4py") else [])]
LENGTHS = {2: [[3, 5], [0, 4], [40_000, 40_000]], 3: [[3, 0, 5], [1, 1, 1]]}


@pytest.fixture(
    scope="module",
    params=[(size, engine) for size in (2, 3) for engine in ENGINES],
    ids=lambda own: f"{own[0]}-{own[1]}",
)
def ranks(request, processes):
    size, engine = request.param
    with Ranks(processes, size, engine=engine) as group:
        yield group.joined()


@pytest.mark.parametrize("in_function", [True, False])
def test_parts_are_added_where_they_belong_and_given_to_all(ranks, in_function):
    size = len(ranks.all)
    for dtype in ("float32", "float64"):
        for lengths in LENGTHS[size]:
            want = [
                (np.arange(n) % 50 + 10 * r) * size + 100 * sum(range(size))
                for r, n in enumerate(lengths)
            ]
            results = ranks.call("exchange_parts", lengths, dtype, in_function)
            for rank, (own, every, _) in enumerate(results):
                np.testing.assert_array_equal(own, want[rank])
                assert own.dtype == dtype
                for got, sums in zip(every, want, strict=True):
                    double = (2 * sums).astype("float16")
                    np.testing.assert_array_equal(got.astype("float16"), double)


@pytest.mark.parametrize("in_function", [True, False])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
def test_each_rank_gets_the_rows_that_all_have_for_it(ranks, dtype, in_function):
    size = len(ranks.all)
    for width in (0, 1, 5):
        results = ranks.call("exchange_rows", width, dtype, in_function)
        for rank, (got, firsts) in enumerate(results):
            from_ranks = 1000 * (1 + np.arange(size))[:, np.newaxis]
            want = from_ranks + 10 * rank + np.arange(width)
            np.testing.assert_array_equal(got, want)
            assert got.dtype == dtype
            for other, first in enumerate(firsts):
                np.testing.assert_array_equal(
                    first, 1000 + 10 * other + np.arange(width)
                )


def test_both_halves_send_what_an_all_reduce_sends(ranks):
    """A ring sends twice all but one share of a tensor, each half that once."""
    size, length = len(ranks.all), 40_000
    shares = {"CollectiveAllToAllV2": (size - 1) / size, "CollectiveGatherV2": size - 1}
    for _, _, sent in ranks.call("exchange_parts", [length] * size, "float64", True):
        if not sent:
            pytest.skip("MPI sends outside of the graph")
        assert {kind for kind, _ in sent} == set(shares)
        in_all = sum(shares[kind] * number for kind, number in sent)
        assert in_all == 2 * 8 * size * length * (size - 1) / size


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([(3, "int32"), (4, "int32")], r"rows int32 .2, 3. on rank 0 and .* .2, 4. on"),
        ([(3, "int32"), (3, "int64")], "rows int32 .* and rows int64"),
        ([(3, "float16")] * 2, "tensors must be float32, float64, int32, int64"),
        ([(3, "int32", True, 1)] * 2, r"rows must be a matrix of known shape, with 2"),
    ],
)
def test_rows_that_differ_are_refused(processes, calls, says):
    with Ranks(processes, 2) as group:
        every = [(*own, True)[: max(3, len(own))] for own in calls]
        with pytest.raises(Raised, match=says):
            group.joined().call_each("exchange_rows", every)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([[3, 5], [3, 4]], "sums float32 .8. on rank 0 and .* .7. on rank 1"),
        ([[3, 5], [4, 4]], "lengths="),
        ([[3], [3]], "parts must be 2 flat tensors of known lengths, one per rank"),
    ],
)
def test_lengths_that_differ_are_refused(processes, lengths, says):
    with Ranks(processes, 2) as group:
        calls = [(own, "float32", True) for own in lengths]
        with pytest.raises(Raised, match=says):
            group.joined().call_each("exchange_parts", calls)

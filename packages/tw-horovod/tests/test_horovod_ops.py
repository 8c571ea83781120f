"""Collectives under Horovod's names, against NumPy: what no row of a table can say.

``horovod_table.py`` of the integration tests has a row per call, for several ranks.
"""

from functools import partial

import horovod_ranks
import ml_dtypes
import numpy as np
import pytest
from harness.ranks import Raised

MODES = ["eager", "function", "session"]


@pytest.fixture(scope="module", params=[1, 3])
def ranks(request, processes):
    threads = 1 if request.param == 3 else 0  # One, or TensorFlow's own choice.
    group = horovod_ranks.make(processes, request.param, threads=threads)
    yield group
    group.end()


def drawn(rank, shape=(5, 2), dtype="float32", low=-8):
    """Whole numbers, of which sums and products of three are exact."""
    draw = np.random.default_rng(100 + rank)
    return draw.integers(max(low, 0) if "u" in dtype else low, 6, shape).astype(dtype)


def call(ranks, name, mode, own, times=1, **options):
    calls = [(name, mode, array, options, times) for array in own]
    return ranks.call_each("call", calls)


OPS = {
    "Average": lambda own: np.sum(own, axis=0) / len(own),
    "Sum": lambda own: np.sum(own, axis=0),
}
NUMBERS = {"Average": 0, "Sum": 1}


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_a_group_is_reduced_in_one_exchange(ranks, compression):
    shapes = [((), "float32"), ((3, 0), "float32"), ((7,), "float64"), ((2,), "int32")]
    own = [
        [drawn(rank.rank, shape, dtype) for shape, dtype in [*shapes, *shapes]]
        for rank in ranks.all
    ]
    options = {"op": NUMBERS["Sum"], "compression": compression}
    for got in call(ranks, "grouped_allreduce", "function", own, **options):
        for array, column in zip(got, zip(*own, strict=True), strict=True):
            np.testing.assert_array_equal(array, np.sum(column, axis=0))


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_what_travels_narrow_is_added_in_float32(ranks, compression):
    # 2048 + 1 is 2048 in float16, 256 + 1 is 256 in bfloat16.
    large = {"fp16": 2048.0, "bf16": 256.0}[compression]
    values = [large, 1.0, 1.0][: len(ranks.all)]
    own = [np.full([5], value, np.float32) for value in values]
    options = {"compression": compression, "op": NUMBERS["Sum"]}
    want = {1: large, 2: large, 3: large + 2.0}[len(values)]
    for got in call(ranks, "allreduce", "function", own, **options):
        np.testing.assert_array_equal(got, np.full([5], want))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "threads", "steps"),
    [("session", 1, 10), ("session", 2, 10), ("function", 0, 2)],
)
def test_independent_collectives_may_begin_in_unlike_orders(
    ranks, mode, threads, steps
):
    size = len(ranks.all)
    for got in ranks.call("reduce_many", mode, threads, steps):
        for n, array in enumerate(got):
            own = n + np.arange(size)  # of each rank
            want = [
                np.full(size, own.sum()),
                own.sum()[None],
                np.repeat(own / size, size),
                own,
            ][n % 4 if mode == "session" else 0]
            np.testing.assert_allclose(array, steps * want, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bool", "int16", ml_dtypes.bfloat16])
def test_any_dtype_is_moved(ranks, dtype):
    own = [drawn(rank.rank, (6, 3), "int32").astype(dtype) for rank in ranks.all]
    parts = [np.split(array, len(own)) for array in own]
    gathered = call(ranks, "allgather", "function", own)
    dealt = call(ranks, "alltoall", "function", own)
    for rank, got in enumerate(zip(gathered, dealt, strict=True)):
        wants = np.concatenate(own), np.concatenate([part[rank] for part in parts])
        for array, want in zip(got, wants, strict=True):
            assert array.dtype == dtype
            np.testing.assert_array_equal(array, want)


def test_alltoall_refuses_splits_that_are_not_the_rows(ranks):
    splits = [1] * len(ranks.all)
    with pytest.raises(Raised, match="alltoall: the splits must be"):
        ranks.call("call", "alltoall", "eager", np.zeros([5]), {"splits": splits})


@pytest.mark.parametrize("dtype", ["float16", "int32"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_reducescatter_gives_the_rows_that_allreduce_gives(ranks, dtype, op):
    draw = np.random.default_rng(3)
    own = [(100 * draw.normal(size=[200, 2])).astype(dtype) for _ in ranks.all]
    options = {"op": NUMBERS[op], "prescale_factor": 0.3, "postscale_factor": 1.7}
    [want, *_] = call(ranks, "allreduce", "eager", own, **options)
    results = call(ranks, "reducescatter", "eager", own, **options)
    np.testing.assert_array_equal(np.concatenate(results), want)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int8"])
@pytest.mark.parametrize("op", ["SUM", "PROD", "MIN", "MAX"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mode", ["eager", "session"])
def test_what_stands_for_mpi_adds_arrays(ranks, dtype, op, in_place, mode):
    own = [
        np.arange(6).reshape(2, 3).astype(dtype) + (r + 1) * (r + 1)
        for r in range(len(ranks.all))
    ]
    ufunc = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
    want = ufunc[op].reduce(np.stack(own), dtype=dtype)
    for got in ranks.call("add_by_mpi", dtype, op, in_place, mode):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_what_stands_for_mpi_gathers_and_adds_objects(ranks):
    size = len(ranks.all)
    each = list(range(size))
    for rank, got in enumerate(ranks.call("exchange_by_mpi")):
        assert got == [
            [float(n) for r in each for n in (r, 7)],
            [[size - 1.0] * 2] * 2,
            [(r, "host") for r in each] if rank == 0 else None,
            each if rank == size - 1 else None,
            sum(each) + 0.5 * size,
            each,
            size - 1,
            [sum(each), size],
            int("".join(map(str, each))),
        ]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("dtype", "recvbuf must have 3 elements of float32; got 3 of float64"),
        ("size", "recvbuf must have 3 elements of float32; got 4 of float32"),
        ("list", r"recvbuf must be a NumPy array; got \[0.0"),
        ("op", r"op must be one of MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX; got <built"),
        ("Send", r"MPI.COMM_WORLD.Send: .*Allreduce \(SUM.*, install mpi4py"),
    ],
)
def test_what_stands_for_mpi_says_what_it_cannot_do(ranks, call, says):
    for rank in ranks.all:
        rank.say("refuse_by_mpi", call)
    for rank in ranks.all:
        with pytest.raises(Raised, match=says):
            rank.hear()


EMPTY = {
    "allreduce": [(0,), (0, 3), (2, 0)],
    "allgather": [(0,), (0, 3), (6, 0), (6, 2, 0, 3)],
    "broadcast": [(0,), (2, 0)],
    "alltoall": [(0,), (0, 3), (6, 0), (6, 2, 0, 3)],
    "reducescatter": [(0,), (0, 3), (6, 0), (6, 2, 0, 3)],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EMPTY)
def test_what_has_no_elements_is_exchanged_like_anything_else(ranks, mode, name):
    size = len(ranks.all)
    options = {"root_rank": 0} if name == "broadcast" else {}
    empty = [np.zeros(shape, "float32") for shape in EMPTY[name]]
    rows = {"allgather": lambda r: r * size, "reducescatter": lambda r: r // size}
    found = ranks.call("meet", name, mode, empty, options)
    for n, calls in enumerate(zip(*found, strict=True)):
        array = empty[n // 2]
        want = (rows.get(name, int)(len(array)), *array.shape[1:])
        assert [result.shape for result, _, _ in calls] == [want] * size
        if name != "broadcast":  # Nobody is through before all have come.
            begun_s = max(begin_s for _, begin_s, _ in calls)
            assert min(end_s for _, _, end_s in calls) >= begun_s


# Of each rank: what it brings, the gradient of its result, options, and its gradient.


def of_allreduce(size, op):
    above = [drawn(rank) for rank in range(size)]
    options = {"op": NUMBERS[op], "prescale_factor": 0.5, "postscale_factor": 4.0}
    return above, above, [options] * size, [2 * OPS[op](above)] * size


def of_allgather(size):
    """The rank's rows of the mean."""
    own = [drawn(rank, (rank + 1, 2)) for rank in range(size)]
    *ends, total = np.cumsum([len(array) for array in own])
    above = [drawn(rank, (total, 2)) for rank in range(size)]
    return own, above, [{}] * size, np.split(np.mean(above, axis=0), ends)


def of_broadcast(size):
    """The mean, for the root alone."""
    above = [drawn(rank) for rank in range(size)]
    zeros = [np.zeros_like(above[0])] * (size - 1)
    return above, above, [{"root_rank": 0}] * size, [np.mean(above, axis=0), *zeros]


def of_alltoall(size):
    """What a rank receives times its number plus one is what comes back for it."""
    splits = [[rank + to for to in range(size)] for rank in range(size)]
    own = [drawn(rank, (sum(splits[rank]), 2)) for rank in range(size)]
    factors = np.float32([[rank + 1] * 2 for rank in range(size)])
    received = np.sum(splits, axis=0)
    above = [np.repeat(factors[[r]], received[r], axis=0) for r in range(size)]
    wants = [np.repeat(factors, sent, axis=0) for sent in splits]
    return own, above, [{"splits": sent} for sent in splits], wants


def of_reducescatter(size, op):
    """All ranks' rows."""
    own, above = [drawn(rank) for rank in range(size)], drawn(9)
    options = {"op": NUMBERS[op], "prescale_factor": 2.0}
    want = 2 * above * (size if op == "Sum" else 1)
    return own, np.array_split(above, size), [options] * size, [want] * size


GRADIENTS = {
    "allgather": of_allgather,
    "broadcast": of_broadcast,
    "alltoall": of_alltoall,
    **{
        f"{make.__name__[3:]}-{op}": partial(make, op=op)
        for make in (of_allreduce, of_reducescatter)
        for op in OPS
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_a_collective_is_what_its_results_have(ranks, mode, name):
    *given, wants = GRADIENTS[name](len(ranks.all))
    function = name.partition("-")[0]
    calls = [(function, mode, *own) for own in zip(*given, strict=True)]
    for got, want in zip(ranks.call_each("gradient", calls), wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)

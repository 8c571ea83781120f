"""Collectives under Horovod's names, against NumPy."""

import horovod_ranks
import numpy as np
import pytest
from harness.ranks import Raised

MODES = ["function", "session"]  # Eager calls run what sessions call.
ALL_MODES = ["eager", *MODES]
SIZES = [1, 2, 3]
REDUCED = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]
MOVED = [*REDUCED, "uint16", "int16", "bool", "bfloat16"]


@pytest.fixture(scope="module", params=SIZES)
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


def all_drawn(ranks, *arguments, **options):
    return [drawn(rank.rank, *arguments, **options) for rank in ranks.all]


OPS = {
    "Average": lambda own: np.sum(own, axis=0) / len(own),
    "Sum": lambda own: np.sum(own, axis=0),
    "Min": lambda own: np.min(own, axis=0),
    "Max": lambda own: np.max(own, axis=0),
    "Product": lambda own: np.prod(own, axis=0),
}
NUMBERS = {"Average": 0, "Sum": 1, "Min": 3, "Max": 4, "Product": 5}


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("op", OPS)
def test_allreduce_is_numpys(ranks, mode, op):
    own = all_drawn(ranks)
    for got in call(ranks, "allreduce", mode, own, times=2, op=NUMBERS[op]):
        np.testing.assert_allclose(got, OPS[op](own), rtol=1e-6)


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("op", ["Sum", "Max", "Product"])
def test_allreduce_keeps_the_dtype(ranks, dtype, op):
    own = all_drawn(ranks, dtype=dtype, low=-3)
    for got in call(ranks, "allreduce", "function", own, op=NUMBERS[op]):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, OPS[op](own).astype(dtype))


def test_means_of_whole_numbers_are_rounded_towards_zero(ranks):
    own = all_drawn(ranks, dtype="int32")
    want = np.trunc(np.sum(own, axis=0) / len(own))
    for got in call(ranks, "allreduce", "eager", own):
        np.testing.assert_array_equal(got, want)


def test_factors_multiply_before_and_after(ranks):
    own = all_drawn(ranks)
    want = 4 * np.max([2 * array for array in own], axis=0)
    options = {"prescale_factor": 2.0, "postscale_factor": 4.0, "op": NUMBERS["Max"]}
    for got in call(ranks, "allreduce", "function", own, **options):
        np.testing.assert_array_equal(got, want)
    options = {"prescale_factor": -1.0, "postscale_factor": 0.5}
    for got in call(ranks, "allreduce", "function", own, **options):
        np.testing.assert_allclose(got, -0.5 * np.mean(own, axis=0), rtol=1e-6)


@pytest.mark.parametrize("average", [False, True])
def test_average_is_understood(ranks, average):
    own = all_drawn(ranks)
    want = OPS["Average" if average else "Sum"](own)
    for got in call(ranks, "allreduce", "eager", own, average=average):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_a_group_is_reduced_in_one_exchange(ranks, mode, compression):
    shapes = [((), "float32"), ((3, 0), "float32"), ((7,), "float64"), ((2,), "int32")]
    own = [
        [drawn(rank.rank, shape, dtype) for shape, dtype in [*shapes, *shapes]]
        for rank in ranks.all
    ]
    options = {"op": NUMBERS["Sum"], "compression": compression}
    for got in call(ranks, "grouped_allreduce", mode, own, **options):
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.each_choice
def test_rows_of_sparse_tensors_are_joined(ranks, mode):
    values = [drawn(r.rank, (r.rank + 1, 2)) for r in ranks.all]
    places = [np.arange(r.rank + 1) + r.rank for r in ranks.all]
    calls = [(mode, v, p, 0) for v, p in zip(values, places, strict=True)]
    for alone, dense, grouped in ranks.call_each("reduce_rows", calls):
        for (rows, indices), share in ((alone, len(values)), (grouped, 1)):
            np.testing.assert_allclose(rows, np.concatenate(values) / share, rtol=1e-6)
            np.testing.assert_array_equal(indices, np.concatenate(places))
        np.testing.assert_array_equal(dense, [len(values)] * 2)


@pytest.mark.full(
    "1-session-2-20",
    "2-session-2-20",
    "2-function-0-2",
    "3-function-0-2",
    "1-session-1-20",
)
@pytest.mark.parametrize(
    ("mode", "threads", "steps"),
    [("session", 1, 20), ("session", 2, 20), ("function", 0, 2)],
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2,), (3, 2), (0, 2)])
def test_allgather_joins_what_differs_in_rows(ranks, mode, shape):
    own = [drawn(r.rank, (r.rank, *shape)) for r in ranks.all]
    for got in call(ranks, "allgather", mode, own, times=2):
        np.testing.assert_array_equal(got, np.concatenate(own))


@pytest.mark.parametrize("name", ["allgather", "broadcast", "alltoall"])
@pytest.mark.each_choice
def test_every_dtype_is_moved(ranks, name):
    options = {"broadcast": {"root_rank": len(ranks.all) - 1}}.get(name, {})
    for dtype in MOVED:
        own = all_drawn(ranks, (6, 3), "int32")
        own = [array.astype(_numpy(dtype)) for array in own]
        parts = [np.split(array, len(own)) for array in own]
        want = {
            "allgather": lambda rank, own=own: np.concatenate(own),
            "broadcast": lambda rank, own=own: own[-1],
            "alltoall": lambda rank, parts=parts: np.concatenate(
                [part[rank] for part in parts]
            ),
        }[name]
        for rank, got in enumerate(call(ranks, name, "function", own, **options)):
            assert got.dtype == _numpy(dtype)
            np.testing.assert_array_equal(got, want(rank))


def _numpy(dtype):
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_is_gathered(ranks, mode):
    own = [
        [drawn(r.rank, (r.rank, 2)), drawn(r.rank, (2,), "uint8")] for r in ranks.all
    ]
    for got in call(ranks, "grouped_allgather", mode, own):
        for array, column in zip(got, zip(*own, strict=True), strict=True):
            np.testing.assert_array_equal(array, np.concatenate(column))


@pytest.mark.parametrize("mode", MODES)
def test_broadcast_gives_the_roots(ranks, mode):
    own = all_drawn(ranks, (3, 2))
    for root in range(len(own)):
        for got in call(ranks, "broadcast", mode, own, root_rank=root):
            np.testing.assert_array_equal(got, own[root])


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_alltoall_deals_as_the_splits_say(ranks, mode, dtype):
    size = len(ranks.all)
    splits = [[(r + to) % 3 for to in range(size)] for r in range(size)]
    own = [drawn(r, (sum(splits[r]), 2), dtype) for r in range(size)]
    parts = [np.split(own[r], np.cumsum(splits[r])[:-1]) for r in range(size)]
    calls = [
        ("alltoall", mode, own[r], {"splits": np.int32(splits[r])}, 2)
        for r in range(size)
    ]
    for rank, (got, counts) in enumerate(ranks.call_each("call", calls)):
        want = np.concatenate([parts[r][rank] for r in range(size)])
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(counts, [s[rank] for s in splits])


def test_alltoall_refuses_splits_that_are_not_the_rows(ranks):
    splits = [1] * len(ranks.all)
    with pytest.raises(Raised, match="alltoall: the splits must be"):
        ranks.call("call", "alltoall", "eager", np.zeros([5]), {"splits": splits})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_reducescatter_gives_the_first_ranks_one_row_more(ranks, mode, rows, op):
    own = all_drawn(ranks, (rows, 2))
    shares = np.array_split(OPS[op](own), len(own))
    results = call(ranks, "reducescatter", mode, own, op=NUMBERS[op])
    for got, want in zip(results, shares, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "int32"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_reducescatter_gives_the_rows_that_allreduce_gives(ranks, dtype, op):
    draw = np.random.default_rng(3)
    own = [(100 * draw.normal(size=[200, 2])).astype(dtype) for _ in ranks.all]
    options = {"op": NUMBERS[op], "prescale_factor": 0.3, "postscale_factor": 1.7}
    [want, *_] = call(ranks, "allreduce", "eager", own, **options)
    results = call(ranks, "reducescatter", "eager", own, **options)
    np.testing.assert_array_equal(np.concatenate(results), want)


def test_a_group_is_reduced_and_scattered(ranks):
    own = [[drawn(r.rank, (4,), "int64"), drawn(r.rank)] for r in ranks.all]
    options = {"op": NUMBERS["Sum"], "prescale_factor": 2.0}
    results = call(ranks, "grouped_reducescatter", "function", own, **options)
    for rank, got in enumerate(results):
        for array, column in zip(got, zip(*own, strict=True), strict=True):
            want = np.array_split(2 * np.sum(column, axis=0), len(own))[rank]
            np.testing.assert_array_equal(array, want)


EMPTY = {
    "allreduce": [(0,), (0, 3), (2, 0)],
    "allgather": [(0,), (0, 3), (6, 0), (6, 2, 0, 3)],
    "broadcast": [(0,), (2, 0)],
    "alltoall": [(0,), (0, 3), (6, 0), (6, 2, 0, 3)],
    "reducescatter": [(0,), (0, 3), (6, 0), (6, 2, 0, 3)],
}


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.each_choice
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


@pytest.mark.parametrize("mode", ALL_MODES)
def test_no_rows_at_all_may_be_dealt(ranks, mode):
    size = len(ranks.all)
    options = {"splits": np.zeros([size], np.int32)}
    for shape in [(0, 2), (0, 0)]:
        own = [np.zeros(shape, "float32")] * size
        for got, counts in call(ranks, "alltoall", mode, own, **options):
            assert got.shape == shape
            np.testing.assert_array_equal(counts, np.zeros(size))


@pytest.mark.parametrize("mode", MODES)
def test_sparse_tensors_may_have_no_rows(ranks, mode):
    values = np.zeros([0, 2], np.float32)
    calls = [(mode, values, np.zeros([0], np.int64), 0)] * len(ranks.all)
    for alone, dense, grouped in ranks.call_each("reduce_rows", calls):
        for rows, indices in (alone, grouped):
            assert rows.shape == (0, 2)
            assert indices.shape == (0,)
        np.testing.assert_array_equal(dense, [len(ranks.all)] * 2)


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_the_gradient_of_allreduce_is_one(ranks, mode, op):
    above = all_drawn(ranks)
    options = {"op": NUMBERS[op], "prescale_factor": 0.5, "postscale_factor": 4.0}
    calls = [("allreduce", mode, array, array, options) for array in above]
    for got in ranks.call_each("gradient", calls):
        np.testing.assert_allclose(got, 2 * OPS[op](above), rtol=1e-6)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_gradient_of_allgather_is_this_ranks_rows_of_the_mean(ranks, mode):
    own = [drawn(r.rank, (r.rank + 1, 2)) for r in ranks.all]
    total = sum(len(array) for array in own)
    above = all_drawn(ranks, (total, 2))
    want = np.split(np.mean(above, axis=0), np.cumsum([len(a) for a in own])[:-1])
    calls = [("allgather", mode, a, g, {}) for a, g in zip(own, above, strict=True)]
    for got, rows in zip(ranks.call_each("gradient", calls), want, strict=True):
        np.testing.assert_allclose(got, rows, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_broadcast_is_the_roots(ranks, mode):
    above = all_drawn(ranks)
    calls = [("broadcast", mode, array, array, {"root_rank": 0}) for array in above]
    for rank, got in enumerate(ranks.call_each("gradient", calls)):
        want = np.mean(above, axis=0) if rank == 0 else np.zeros_like(above[0])
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_alltoall_goes_back(ranks, mode):
    size = len(ranks.all)
    splits = [[r + to for to in range(size)] for r in range(size)]
    own = [drawn(r, (sum(splits[r]), 2)) for r in range(size)]
    # What a rank receives times its number plus one is what comes back for it.
    calls = []
    for r in range(size):
        got = sum(splits[other][r] for other in range(size))
        above = np.full([got, 2], r + 1, np.float32)
        calls.append(("alltoall", mode, own[r], above, {"splits": splits[r]}))
    for r, got in enumerate(ranks.call_each("gradient", calls)):
        want = np.repeat(np.arange(size) + 1, splits[r])
        np.testing.assert_array_equal(got, np.stack([want, want], axis=1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_the_gradient_of_reducescatter_is_gathered(ranks, mode, op):
    size = len(ranks.all)
    own = all_drawn(ranks, (5, 2))
    above = np.array_split(drawn(9), size)
    options = {"op": NUMBERS[op], "prescale_factor": 2.0}
    calls = [
        ("reducescatter", mode, a, g, options) for a, g in zip(own, above, strict=True)
    ]
    want = 2 * drawn(9) * (size if op == "Sum" else 1)
    for got in ranks.call_each("gradient", calls):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("root", [0, -1])
def test_objects_are_passed_around(ranks, root):
    objects = [{"rank": r.rank, "rows": list(range(99 * r.rank))} for r in ranks.all]
    calls = [(obj, root % len(objects)) for obj in objects]
    for got, again, gathered in ranks.call_each("pass_around", calls):
        assert got == again == objects[root]
        assert gathered == objects


def test_ranks_know_their_places(ranks):
    size = len(ranks.all)
    for rank, got in enumerate(ranks.call("place")):
        numbers = {"size": size, "local_size": size, "cross_size": 1, "cross_rank": 0}
        numbers |= {"rank": rank, "local_rank": rank, "is_homogeneous": True}
        ops = {"size_op": size, "rank_op": rank}
        assert got == numbers | ops | {"local_size_op": size, "local_rank_op": rank}

"""Weighted means over towers: any partition of the rows gives what one device gives."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from reduce_given import REDUCERS, balanced, on_towers

from tw_core.testing import CPUS, run_eagerly, run_in_function, run_in_graph
from tw_reduce import accumulate_as, all_reduce, mean

MODES = {"graph": run_in_graph, "function": run_in_function, "eager": run_eagerly}
each_mode = pytest.mark.parametrize("mode", MODES)
# On both sides of the elements (4,096) from which packs leave a tensor alone.
SHAPES = [(), (3,), (2, 4), (0,), (4_095,), (64, 64), (90, 70)]


# name -> K -> reducer of sums
KINDS = {
    name: REDUCERS[name]
    for name in (
        *("all_reduce", "auto", "balanced", "packed broadcast", "hierarchical"),
        *("compress", "accumulate as", "partition", "packed collective"),
    )
}
KINDS["accumulate as float16"] = lambda k: accumulate_as(balanced(k), tf.float16)
KINDS["one's own"] = lambda k: lambda grads: balanced(k)(grads)
each_reducer = pytest.mark.parametrize(
    ("mode", "name"),
    [("function", name) for name in KINDS]
    + [("graph", name) for name in ("all_reduce", "packed collective", "one's own")]
    + [("eager", name) for name in ("all_reduce", "packed broadcast", "compress")],
)


def reduce(mode, name, towers, weights):
    reducer = KINDS[name](len(towers))

    def weighted(grads, weights):
        return mean(reducer, weights=weights)(grads)

    return MODES[mode](partial(on_towers, weighted), towers, weights)


def rows_of(counts, shapes=SHAPES, dtype=np.float32, seed=0):
    """Whole numbers per row, [rows, ...], multiples of 12 so that means are exact."""
    random = np.random.default_rng(seed)
    return [
        (12 * random.integers(-4, 5, (sum(counts), *shape))).astype(dtype)
        for shape in shapes
    ]


def tower_means(rows, counts):
    """[K][N] means over each tower's rows; NaN over none, as TensorFlow has it."""
    ends = np.cumsum(counts)
    with np.errstate(invalid="ignore"):
        return [
            [
                np.asarray(own[end - count : end].sum(axis=0) / own.dtype.type(count))
                for own in rows
            ]
            for end, count in zip(ends, counts, strict=True)
        ]


@each_reducer
@pytest.mark.parametrize(
    "counts", [(4,), (4, 4), (2, 1, 1), (4, 0, 2, 2), (0, 8), (4, 2), (2, 1)]
)
def test_rows_count_alike_however_towers_share_them(mode, name, counts):
    rows = rows_of(counts)
    want = [own.mean(axis=0) for own in rows]
    weights = [np.float32(count) for count in counts]
    for row in reduce(mode, name, tower_means(rows, counts), weights):
        for value, wanted in zip(row, want, strict=True):
            np.testing.assert_array_equal(value, wanted)
            assert value.dtype == wanted.dtype


@each_mode
@pytest.mark.parametrize("dtype", [np.float16, np.float64, tf.bfloat16.as_numpy_dtype])
def test_other_dtypes_count_alike(mode, dtype):
    rows = rows_of((2, 1, 1), dtype=np.float64)
    towers = [[own.astype(dtype) for own in t] for t in tower_means(rows, (2, 1, 1))]
    for row in reduce(mode, "all_reduce", towers, [2, 1, 1]):
        for value, own in zip(row, rows, strict=True):
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, own.mean(axis=0).astype(dtype))


@each_reducer
@pytest.mark.parametrize("weight", [np.float32(0.1), np.int64(7), np.float64(1e-30)])
def test_equal_weights_have_the_plain_means_bits(mode, name, weight):
    random = np.random.default_rng(1)
    towers = [
        [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
        for _ in range(3)
    ]
    want = MODES[mode](
        partial(on_towers, lambda grads, _: mean(KINDS[name](3))(grads)), towers, []
    )
    got = reduce(mode, name, towers, [weight] * 3)
    for own, plain in zip(got, want, strict=True):
        for value, wanted in zip(own, plain, strict=True):
            np.testing.assert_array_equal(value, wanted)


@each_mode
def test_a_tower_counts_as_its_weight_says(mode):
    def check(values, weights, wanted):
        towers = [[np.float32(own)] for own in values]
        for [got] in reduce(mode, "all_reduce", towers, weights):
            np.testing.assert_array_equal(got, wanted)

    check([[8.0], [16.0]], [3, 1], [10.0])  # Python's numbers
    check([[np.nan, np.inf]] * 3, [np.float32(0)] * 3, [0, 0])
    check([[1, np.nan], [1, 1]], [np.float32(1)] * 2, [1, np.nan])


@each_mode
def test_rows_of_sparse_gradients_are_weighed(mode):
    def sparse(first, second):
        slices = [
            tf.IndexedSlices(values, tf.constant([0, 2]), tf.constant([3, 1]))
            for values in (first, second)
        ]
        means = mean(all_reduce(CPUS[:2]), weights=[3, 1])([[s] for s in slices])
        return [tf.convert_to_tensor(row[0]) for row in means]

    got = MODES[mode](sparse, np.float32([[4], [8]]), np.float32([[8], [0]]))
    np.testing.assert_array_equal(got, [[[5], [0], [6]]] * 2)

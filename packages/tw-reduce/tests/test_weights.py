"""Weighted means over towers: any partition of the rows gives what one device gives."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_core.testing import run_eagerly, run_in_function, run_in_graph
from tw_reduce import (
    accumulate_as,
    all_reduce,
    auto,
    broadcast,
    compress,
    hierarchical,
    mean,
    packed,
    partition,
    sum_balanced,
    sum_collective,
)
from tw_reduce.reducers import CollectiveKeys

CPUS = [f"/cpu:{k}" for k in range(8)]
KEYS = CollectiveKeys()
MODES = {"graph": run_in_graph, "function": run_in_function, "eager": run_eagerly}
each_mode = pytest.mark.parametrize("mode", MODES)
# On both sides of the elements (4,096) from which packs leave a tensor alone.
SHAPES = [(), (3,), (2, 4), (0,), (4_095,), (64, 64), (90, 70)]


def balanced(k):
    return partial(sum_balanced, devices=CPUS[:k])


# name -> K -> reducer of sums
REDUCERS = {
    "all_reduce": lambda k: all_reduce(CPUS[:k]),
    "auto": lambda k: auto(CPUS[:k]),
    "balanced": balanced,
    "packed": lambda k: packed(balanced(k)),
    "packed broadcast": lambda k: packed(broadcast(balanced(k))),
    "hierarchical": lambda k: hierarchical([range(k)], devices=CPUS[:k]),
    "partition": lambda k: partition(
        lambda info: info.dtype,
        {"float32": packed(balanced(k)), "float16": balanced(k)},
    ),
    "compress": lambda k: packed(compress(balanced(k), tf.bfloat16)),
    "accumulate as": lambda k: accumulate_as(balanced(k), tf.float64),
    "accumulate as float16": lambda k: accumulate_as(balanced(k), tf.float16),
    "one's own": lambda k: lambda grads: balanced(k)(grads),
    "collective": lambda k: packed(
        partial(sum_collective, devices=CPUS[:k], keys=KEYS, timeout_s=60)
    ),
}
each_reducer = pytest.mark.parametrize(
    ("mode", "name"),
    [(m, n) for n in REDUCERS for m in MODES if (m, n) != ("eager", "collective")],
)


def on_towers(fn, grads, weights):
    placed = []
    for device, tower in zip(CPUS, grads, strict=False):
        with tf.device(device):
            placed.append([tf.nest.map_structure(tf.identity, g) for g in tower])
    return fn(placed, weights)


def reduce(mode, name, towers, weights):
    reducer = REDUCERS[name](len(towers))

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
@pytest.mark.each_choice
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
@pytest.mark.each_choice
def test_equal_weights_have_the_plain_means_bits(mode, name, weight):
    random = np.random.default_rng(1)
    towers = [
        [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]
        for _ in range(7)
    ]
    want = MODES[mode](
        partial(on_towers, lambda grads, _: mean(REDUCERS[name](7))(grads)), towers, []
    )
    got = reduce(mode, name, towers, [weight] * 7)
    for own, plain in zip(got, want, strict=True):
        for value, wanted in zip(own, plain, strict=True):
            np.testing.assert_array_equal(value, wanted)


@each_mode
def test_python_numbers_weigh_as_tensors_do(mode):
    towers = [[np.float32([8.0])], [np.float32([16.0])]]
    got = MODES[mode](
        partial(on_towers, lambda g, _: mean(all_reduce(CPUS[:2]), weights=[3, 1])(g)),
        towers,
        [],
    )
    np.testing.assert_array_equal(got, [[[10.0]], [[10.0]]])


@each_mode
def test_no_weight_at_all_gives_zeros_and_keeps_no_nan(mode):
    towers = [[np.float32([np.nan, np.inf])]] * 3
    for row in reduce(mode, "all_reduce", towers, [np.float32(0)] * 3):
        np.testing.assert_array_equal(row, [[0, 0]])


@each_mode
def test_nan_of_a_tower_that_counts_arrives(mode):
    towers = [[np.float32([1, np.nan])], [np.float32([1, 1])]]
    for row in reduce(mode, "all_reduce", towers, [np.float32(1), np.float32(1)]):
        np.testing.assert_array_equal(row, [[1, np.nan]])


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


def test_metrics_are_weighed_as_gradients_are():
    losses = [
        [tf.constant(2.0), tf.constant(0.5)],
        [tf.constant(5.0), tf.constant(1.0)],
    ]
    rows = mean(all_reduce(CPUS[:2]), weights=[2, 1])(losses)
    np.testing.assert_allclose(rows, [[3.0, 2 / 3]] * 2, rtol=1e-6)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.data())
def test_any_partition_gives_the_mean_of_all_rows(counts, data):
    rows = data.draw(
        st.lists(st.integers(-99, 99), min_size=sum(counts), max_size=sum(counts))
    )
    column = [np.float64(rows)]
    towers = [[tf.constant(g[0])] for g in tower_means(column, counts)]
    got = mean(balanced(len(counts)), weights=counts)(towers)
    np.testing.assert_allclose(got[0][0], np.mean(rows), rtol=1e-12, atol=1e-12)


def test_products_are_made_of_packs_and_not_of_each_gradient():
    with tf.Graph().as_default() as graph:
        towers = [
            [tf.compat.v1.placeholder(tf.float32, [3]) for _ in range(9)]
            for _ in range(2)
        ]
        mean(all_reduce(CPUS[:2]), weights=[tf.constant(1.0), tf.constant(2.0)])(towers)
        kinds = [op.type for op in graph.get_operations()]
    assert kinds.count("MulNoNan") == 2


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1, -2], ValueError, "weights must be finite and 0 or more; got tower 1: -2"),
        ([float("nan"), 1], ValueError, "finite and 0 or more; got tower 0: nan"),
        ([1, "2"], TypeError, "one per tower; got tower 1: '2'"),
        ([True, 1], TypeError, "one per tower; got tower 0: True"),
        ([[1], 1], TypeError, "one per tower; got tower 0: [1]"),
        ([], ValueError, "weights must hold at least one"),
        (3, TypeError, "weights must be a list"),
        ([1, 2, 3], ValueError, r"weights must be one per tower (2); got 3"),
    ],
)
def test_what_are_no_weights_is_refused(weights, error, message):
    grads = [[tf.constant([1.0])], [tf.constant([1.0])]]
    with pytest.raises(error) as caught:
        mean(all_reduce(CPUS[:2]), weights=weights)(grads)
    assert message in str(caught.value)

"""Means of float16 and bfloat16 are those of float32, rounded once."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from reduce_given import KEYS, balanced, collective, on_towers

import tw_core
from tw_core.testing import CPUS, SparseRows, run_eagerly, run_in_function, run_in_graph
from tw_reduce import (
    accumulate_as,
    auto,
    broadcast,
    compress,
    hierarchical,
    mean,
    packed,
    partition,
    reducer_for_mode,
    sum_on_device,
    sum_round_robin,
)
from tw_reduce.tensorpack import (
    aggregate_grads_colocate,
    allreduce_grads,
    allreduce_grads_hierarchical,
    allreduce_grads_naive,
)

HALVES = (np.float16, tf.bfloat16.as_numpy_dtype)
MODES = {"graph": run_in_graph, "function": run_in_function, "eager": run_eagerly}
each_mode = pytest.mark.parametrize("mode", MODES)


def colocated(num_towers):
    """Makes ``aggregate_grads_colocate`` a reducer of up to five gradients."""
    any_shape = tf.TensorShape(None)
    variables = [tf.Variable(0.0, shape=any_shape, name=name) for name in "abcde"]

    def reducer(grads):
        towers = [list(zip(tower, variables, strict=False)) for tower in grads]
        reduced = [grad for grad, _ in aggregate_grads_colocate(towers)]
        return [reduced] * num_towers

    return reducer


# name -> K -> reducer of means
MEANS = {
    "on one device": lambda k: mean(partial(sum_on_device, device=CPUS[0])),
    "round robin": lambda k: mean(partial(sum_round_robin, devices=CPUS[:k])),
    "balanced": lambda k: mean(balanced(k)),
    "hierarchical": lambda k: mean(hierarchical([range(k)], devices=CPUS[:k])),
    "packed": lambda k: mean(packed(balanced(k))),
    "packed around the mean": lambda k: packed(mean(balanced(k))),
    "broadcast": lambda k: mean(packed(broadcast(balanced(k)))),
    "compress": lambda k: mean(compress(balanced(k), tf.float16)),
    "accumulate as float64": lambda k: mean(accumulate_as(balanced(k), tf.float64)),
    "partition by dtype": lambda k: mean(
        partition(
            lambda info: info.dtype,
            {"float16": balanced(k), "bfloat16": packed(balanced(k))},
        )
    ),
    "auto": lambda k: mean(auto(CPUS[:k])),
    "one's own": lambda k: mean(lambda grads: balanced(k)(grads)),
    "collective": lambda k: mean(collective(k)),
    "mode cpu": lambda k: mean(reducer_for_mode("cpu", CPUS[:k])),
    "allreduce_grads": lambda k: partial(
        allreduce_grads, average=True, mode="collective", keys=KEYS
    ),
    "naive": lambda k: lambda grads: [allreduce_grads_naive(grads, CPUS[:k])],
    "colocate": colocated,
}


def means(mode, name, towers):
    return MODES[mode](partial(on_towers, MEANS[name](len(towers))), towers)


@pytest.mark.parametrize(
    ("mode", "name"),
    [("function", name) for name in MEANS]
    + [("graph", name) for name in ("balanced", "packed", "collective", "colocate")]
    + [("eager", name) for name in ("broadcast", "hierarchical", "auto", "naive")],
)
def test_the_mean_is_that_of_float32_rounded_once(mode, name):
    """Sums are out of range, numbers the smallest there are, and some random."""
    random = np.random.default_rng(4)
    smallest = np.array([1, 2, 3, 1025, 1027], np.int16).view(np.float16)
    same = [np.full(4, 30_000, np.float16), np.full(5_000, -60_000, np.float16)]
    towers = [
        [*same, smallest, *(random.standard_normal((9, 4)).astype(d) for d in HALVES)]
        for _ in range(3)
    ]
    for row in means(mode, name, towers):
        for value, *column in zip(row, *towers, strict=True):
            total = np.sum([np.asarray(own, np.float32) for own in column], axis=0)
            assert value.dtype == column[0].dtype
            wanted = (total * np.float32(1 / 3)).astype(value.dtype)
            np.testing.assert_array_equal(value, wanted)
        for value, own in zip(row, (*same, smallest), strict=False):
            np.testing.assert_array_equal(value, own)


@pytest.mark.parametrize("run", [run_in_graph, run_in_function])
def test_eight_towers_in_two_groups_keep_their_mean(run):
    towers = [[np.full(4, 50_000, np.float16)]] * 8
    reducer = partial(allreduce_grads_hierarchical, devices=CPUS, average=True)
    for [value] in run(partial(on_towers, reducer), towers):
        np.testing.assert_array_equal(value, towers[0][0])


@each_mode
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_float16_sums_of_a_mean_are_divided_first(mode, dtype):
    towers = [[np.full(3, 20_000, dtype), np.full(4_096, 32, dtype)]] * 4
    reducer = mean(packed(accumulate_as(balanced(4), tf.float16)))
    for row in MODES[mode](partial(on_towers, reducer), towers):
        for value, wanted in zip(row, towers[0], strict=True):
            assert value.dtype == dtype
            np.testing.assert_array_equal(value, wanted)


@each_mode
@pytest.mark.parametrize(
    "name", ["balanced", "packed", "auto", "hierarchical", "naive", "one's own"]
)
def test_sparse_rows_and_columns_made_dense_keep_their_mean(mode, name):
    rows = SparseRows(
        np.full((2, 3), 30_000, np.float16), np.array([1, 0]), np.array([2, 3])
    )
    dense = np.full((2, 3), 30_000, np.float16)
    towers = [[rows, rows], [rows, dense], [rows, dense], [rows, dense]]
    for stays, becomes in means(mode, name, towers):
        assert stays.values.dtype == becomes.dtype == np.float16
        np.testing.assert_array_equal(stays.values, np.full((8, 3), 7_500))
        np.testing.assert_array_equal(becomes, dense)


@pytest.mark.parametrize("half", HALVES)
def test_halves_travel_as_they_are_and_widen_where_they_are_added(half, graph):
    grads = []
    for device in CPUS[:2]:
        with tf.device(device):
            fed = [tf.compat.v1.placeholder(half, [5_000]) for _ in range(2)]
            grads.append([tf.identity(tensor) for tensor in fed])
    results = mean(partial(sum_on_device, device=CPUS[0]))(grads)
    moved = tw_core.placement(graph, fetches=results[0]).transfers
    assert [move.num_bytes for move in moved] == [2 * 5_000 * 2]


def test_float32_is_neither_cast_nor_divided_first(graph):
    plans, dtypes = [], [tf.float16, tf.float32]
    mean(packed(balanced(2)))([[tf.ones([10]), tf.ones([5_000])] for _ in range(2)])
    kinds = [op.type for op in graph.get_operations()]
    assert "Cast" not in kinds
    assert kinds.count("Mul") == 2
    # Nor does a plan see other dtypes than the gradients'.
    mean(auto(CPUS[:2], explain=plans.append))([[tf.ones([9], d) for d in dtypes]] * 2)
    [plan] = plans
    assert [choice.tensor.dtype for choice in plan.choices] == ["float16", "float32"]

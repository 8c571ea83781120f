"""Reducers, and gradients on their towers' devices."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tw_core.testing import CPUS, run_in_function, run_in_graph
from tw_reduce import (
    accumulate_as,
    all_reduce,
    auto,
    broadcast,
    compress,
    hierarchical,
    packed,
    partition,
    sum_balanced,
    sum_collective,
    sum_on_device,
    sum_round_robin,
)
from tw_reduce.reducers import CollectiveKeys

KEYS = CollectiveKeys()  # one object for all reducers of the process
WAIT_S = 60.0
MODES = {"graph": run_in_graph, "function": run_in_function}
each_mode = pytest.mark.parametrize("mode", MODES)


def groups_of(num_towers):
    half = (num_towers + 1) // 2
    both = (tuple(range(half)), tuple(range(half, num_towers)))
    return tuple(group for group in both if group)


def balanced(k):
    return partial(sum_balanced, devices=CPUS[:k])


def collective(k):
    return partial(sum_collective, devices=CPUS[:k], keys=KEYS, timeout_s=WAIT_S)


def by_kind(k):
    return partition(
        lambda info: "sparse" if info.is_sparse else "dense",
        {"sparse": balanced(k), "dense": packed(balanced(k), below_bytes=40)},
    )


# name -> K -> reducer of sums
REDUCERS = {
    "on one device": lambda k: partial(sum_on_device, device=CPUS[0]),
    "round robin": lambda k: partial(sum_round_robin, devices=CPUS[:k]),
    "balanced": balanced,
    "hierarchical": lambda k: hierarchical(groups_of(k), devices=CPUS[:k]),
    "collective": collective,
    "packed balanced": lambda k: packed(balanced(k), below_bytes=40),
    "packed broadcast": lambda k: packed(broadcast(balanced(k))),
    "broadcast": lambda k: broadcast(balanced(k)),
    "packed collective": lambda k: packed(collective(k)),
    "on own devices": lambda k: hierarchical(groups_of(k)),
    "packed hierarchical": lambda k: packed(REDUCERS["hierarchical"](k)),
    "compress": lambda k: packed(compress(balanced(k), tf.bfloat16)),
    "accumulate as": lambda k: accumulate_as(balanced(k), tf.float64),
    "partition": by_kind,
    "auto": lambda k: auto(CPUS[:k]),
    "all_reduce": lambda k: all_reduce(CPUS[:k]),
}
each_reducer = pytest.mark.parametrize("name", REDUCERS)


def on_towers(fn, grads, *more):
    """Puts tower k's gradients on its device, as a backward pass leaves them."""
    placed = []
    for device, tower in zip(CPUS, grads, strict=False):
        with tf.device(device):
            placed.append(
                tf.nest.map_structure(tf.identity, list(tower), expand_composites=True)
            )
    return fn(placed, *more)


def whole_numbers(num_towers, shapes, dtype=np.float32, seed=0):
    """Small whole numbers, whose sums are exact in every order."""
    random = np.random.default_rng(seed)
    return [
        [np.asarray(random.integers(-8, 9, shape)).astype(dtype) for shape in shapes]
        for _ in range(num_towers)
    ]


def sums_of(towers):
    # Python's sum begins with an int, with which older NumPy widens a scalar.
    columns = zip(*towers, strict=True)
    return [np.sum(column, axis=0, dtype=column[0].dtype) for column in columns]


def assert_rows(got, want):
    """Checks that each tower has these values, with their dtypes and shapes."""
    for row in got:
        for n, (value, wanted) in enumerate(zip(row, want, strict=True)):
            np.testing.assert_array_equal(value, wanted, err_msg=str(n))
            assert value.dtype == wanted.dtype
            assert np.shape(value) == np.shape(wanted)


def steps(mode, fn, specs, make=tuple):
    """Builds ``fn(*tensors, *make())``; returns a function of arrays that runs it.

    In a graph its ``read`` gives the value of a variable.

    Args:
      mode: "graph" or "function".
      fn: takes a tensor for each spec, and returns a structure of tensors.
      specs: what is known of the tensors while building.
      make: makes further arguments, as variables.
    """
    graph = tf.Graph() if mode == "graph" else None
    with graph.as_default() if graph else nullcontext():
        more = make()
        if not graph:
            return tf.function(lambda *own: fn(*own, *more), specs, autograph=False)
        fed = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
        results = fn(*fed, *more)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": len(CPUS)})
        session = tf.compat.v1.Session(config=config)
        session.run(tf.compat.v1.global_variables_initializer())

    def run(*arrays):
        return session.run(results, dict(zip(fed, arrays, strict=True)))

    run.read = session.run
    return run

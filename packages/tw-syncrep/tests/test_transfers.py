"""What crosses the network in a worker's step, and what comes of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import run_replicas
from harness.task_programs import received_tensors
from syncrep_given import make

import tw_syncrep

v1 = tf.compat.v1


BELOW = 64
SMALL, LARGE = [15], [16]
"""Of four bytes an element: on both sides of the bound for packs."""

# What is given (server, dtype, shape, or rows of a table), and what then crosses from
# and to the worker and between the servers, the first of which has the run table.
CASES = {
    "one": ([(0, "float32", SMALL)], {"w>ps0": 1, "ps0>w": 1}),
    "many": ([(0, "float32", SMALL)] * 9, {"w>ps0": 1, "ps0>w": 1}),
    "a scalar": ([(0, "float32", [])], {"w>ps0": 1, "ps0>w": 1}),
    "large": ([(0, "float32", LARGE)] * 2, {"w>ps0": 3, "ps0>w": 1}),
    "both": (
        [(0, "float32", SMALL), (0, "float32", LARGE), (0, "float32", SMALL)],
        {"w>ps0": 2, "ps0>w": 1},
    ),
    "two dtypes": (
        [(0, "float32", SMALL), (0, "float64", [7]), (0, "float32", [2, 3])],
        {"w>ps0": 2, "ps0>w": 2},
    ),
    "sparse": ([(0, "float32", "rows")], {"w>ps0": 2, "ps0>w": 1}),
    "two sparse": ([(0, "float32", "rows")] * 2, {"w>ps0": 3, "ps0>w": 1}),
    "sparse and dense": (
        [(0, "float32", SMALL), (0, "float32", "rows")],
        {"w>ps0": 3, "ps0>w": 1},
    ),
    "two servers": (
        [(0, "float32", SMALL), (1, "float32", SMALL)] * 2,
        {
            **{"w>ps0": 1, "w>ps1": 1, "ps1>ps0": 1},
            **{"ps0>w": 1, "ps0>ps1": 1, "ps1>w": 1},
        },
    ),
    "the other server alone": (
        [(1, "float32", SMALL)] * 2,
        {
            **{"w>ps0": 1, "w>ps1": 1, "ps1>ps0": 1},
            **{"ps0>w": 1, "ps0>ps1": 1, "ps1>w": 1},
        },
    ),
    "all on two servers": (
        [
            *[(0, "float32", SMALL), (0, "float64", [7]), (0, "float32", LARGE)],
            *[(1, "float32", LARGE), (1, "float32", "rows"), (1, "float32", SMALL)],
        ],
        {
            **{"w>ps0": 3, "w>ps1": 4, "ps1>ps0": 1},
            **{"ps0>w": 2, "ps0>ps1": 1, "ps1>w": 1},
        },
    ),
}


def numbers(n, shape):
    """Distinct small whole numbers, whose sums are exact in each dtype."""
    return (np.arange(np.prod(shape, dtype=int)) % 7 + n).reshape(shape)


def pairs_of(given, replica):
    """Returns gradients of the given kinds, twice as large in the second replica."""
    found = []
    for n, (server, dtype, shape) in enumerate(given):
        is_sparse = shape == "rows"
        shape = [4, 32] if is_sparse else shape
        with tf.device(f"/job:ps/task:{server}"):
            zeros = v1.zeros_initializer()
            variable = v1.get_variable(f"v{n}", shape, dtype, zeros)
        rows = [replica, 3, 3][: 3 - replica] if is_sparse else []
        shape = [len(rows), *shape[1:]] if is_sparse else shape
        values = tf.constant(numbers(n, shape) * (replica + 1), dtype)
        grad = v1.placeholder_with_default(values, shape)
        if is_sparse:
            at = v1.placeholder_with_default(tf.constant(rows, tf.int32), [None])
            grad = tf.IndexedSlices(grad, at, tf.constant([4, 32]))
        found.append((grad, variable))
    return found


def applied(n, shape, weights):
    """Returns what two replicas' gradients make of a variable of zeros."""
    shares = np.divide(weights, sum(weights))
    if shape != "rows":
        return -numbers(n, shape) * (shares @ [1, 2])
    table = np.zeros([4, 32])
    for replica in range(2):
        rows = [replica, 3, 3][: 3 - replica]
        sent = numbers(n, [len(rows), 32]) * (replica + 1)
        np.subtract.at(table, rows, sent * shares[replica])
    return table


@pytest.mark.slow(by_day=["both--"])
@pytest.mark.parametrize(
    ("case", "compression", "weights"),
    [
        *((case, None, None) for case in CASES),
        # Those that have all of the others' kinds of gradients.
        ("both", tf.bfloat16, None),
        ("two dtypes", tf.bfloat16, (3, 1)),
        ("sparse and dense", None, (3, 1)),
        ("all on two servers", tf.bfloat16, (3, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_what_is_small_travels_as_one_tensor_per_server(case, compression, weights):
    """Weights travel with the tickets, and need no tensor of their own."""
    given, want = CASES[case]

    def weight_of(replica):
        return None if weights is None else tf.constant(weights[replica])

    def build(task):
        with tf.device("/job:ps/task:0"):
            v1.train.get_or_create_global_step()
        with tw_syncrep.pulled_together(task, below_bytes=BELOW):
            model = make(
                task,
                lambda replica: pairs_of(given, replica),
                fuse_below_bytes=BELOW,
                compression=compression,
                weight_of=weight_of,
            )
        return SimpleNamespace(
            hooks=model.hooks,
            train=model.train,
            values=[v for v in v1.trainable_variables()],
            copies=[cached.copy for cached in tw_syncrep.cached_parameters()],
        )

    def drive(replica, model, session):
        options = v1.RunOptions(output_partition_graphs=True)
        metadata = v1.RunMetadata()
        session.run(model.train, options=options, run_metadata=metadata)
        values, copies = session.run([model.values, model.copies])
        return received_tensors(metadata), values, copies

    places = {"/job:ps/task:0": "ps0", "/job:ps/task:1": "ps1"}
    for received, values, copies in run_replicas(2, build, drive):
        crossed = {}
        for sender, receiver, _ in received:
            path = f"{places.get(sender, 'w')}>{places.get(receiver, 'w')}"
            crossed[path] = crossed.get(path, 0) + 1
        assert crossed == want, received
        shares = (1, 1) if weights is None else weights
        wanted = [applied(n, shape, shares) for n, (*_, shape) in enumerate(given)]
        for value, expected in zip(values, wanted, strict=True):
            np.testing.assert_array_equal(value, expected)
        small = [v for v in values if v.nbytes < BELOW]
        assert len(copies) == len(small)
        for copy, value in zip(copies, small, strict=True):
            np.testing.assert_array_equal(copy, value)

"""Gradients that do not fit their variables: refused while building, or in the step.

Variables lie on both sides of the bound for packs, here 64 bytes.
"""

import re
import threading

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import new_container, run_replicas, start_by_hand
from syncrep_given import make, sgd

v1 = tf.compat.v1
BELOW = 64
OPTIMIZERS = {
    "sgd": sgd,
    "momentum": lambda: v1.train.MomentumOptimizer(0.5, 0.5),
    "adam": lambda: v1.train.AdamOptimizer(0.5),
}


def variable(name, shape):
    return v1.get_variable(name, shape, initializer=v1.zeros_initializer())


def unknown(array):
    """A tensor of which only the dtype is known."""
    return v1.placeholder_with_default(tf.constant(array, tf.float32), None)


def build_one(pairs_of):
    """Builds a replica that is alone, without a cluster."""
    with tf.Graph().as_default():
        task = type("Task", (), {"replica_index": 0, "is_chief": True})
        make(task, lambda _: pairs_of(), aggregate=1)


def fed(shape):
    return lambda: v1.placeholder(tf.float32, shape)


def rows(shape):
    return lambda: tf.IndexedSlices(tf.ones(shape), tf.zeros([2], tf.int64))


MISFIT = [
    (fed([2, 3]), (3, 2), "(2, 3) for a:0 of (3, 2)"),
    (fed([5]), (6,), "(5,) for a:0 of (6,)"),
    (fed([1]), (), "(1,) for a:0 of ()"),
    (fed([None, 3]), (3, 2), "(None, 3) for a:0 of (3, 2)"),
    *(
        (rows(shape), (4, 2), f"{shape} at indices (2,) for a:0 of (4, 2)")
        for shape in ((2, 3), (3, 2), (2,))
    ),
]


@pytest.mark.parametrize("make, want, message", MISFIT)
def test_known_shapes_and_dtypes_that_do_not_fit_are_named(make, want, message):
    def pairs():
        return [
            (tf.ones([3]), variable("fits", [3])),
            (make(), variable("a", want)),
            (tf.ones([4]), variable("b", [2])),
        ]

    with pytest.raises(ValueError, match=re.escape(f"{message}; (4,) for b:0 of (2,)")):
        build_one(pairs)

    def pairs_of_other_dtypes():
        dtypes = {"c": tf.float16, "d": tf.bool}
        return [(tf.ones([2], d), variable(n, [2])) for n, d in dtypes.items()]

    message = r"float16 for c:0 \(float32\), bool for d:0 \(float32\)\. Cast it"
    with pytest.raises(TypeError, match=message):
        build_one(pairs_of_other_dtypes)


def fails_in_its_step(pairs_of, message):
    """Has a replica that is alone in its run take a step, and hears what it says."""

    def build(task):
        return make(task, lambda _: pairs_of(), aggregate=1, fuse_below_bytes=BELOW)

    model, session = start_by_hand(0, build, container=new_container())
    session.run(model.opt.chief_init_op)
    raised = []

    def step():
        try:
            session.run(model.train)
        except tf.errors.InvalidArgumentError as error:
            raised.append(str(error))

    # What does not fail waits for a chief.
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(30)
    assert raised, "the step did not fail"
    assert re.search(message, raised[0])
    assert model.opt.status(session).arrived == ()


RUNS = {
    "in a pack, two that make up for each other": [([6], [5]), ([2], [3])],
    "in a pack, turned": [([3, 2], [2, 3])],
    "alone": [([6, 4], [4, 6])],
    "of another rank": [([6], [6, 1])],
    "a scalar": [([1], [])],
}


def sizes(shape):
    return re.escape(f"[{','.join(map(str, shape))}]")


@pytest.mark.parametrize("case", RUNS)
def test_shapes_that_only_a_run_knows_are_compared_in_it(case):
    def pairs():
        return [
            (unknown(np.ones(got)), variable(f"v{n}", want))
            for n, (want, got) in enumerate(RUNS[case])
        ]

    named = "|".join(
        rf"v{n}.*{sizes(got)} is not .* shape {sizes(want)}"
        for n, (want, got) in enumerate(RUNS[case])
    )
    fails_in_its_step(pairs, f"(?s)check_gradient_shape/tower0/({named})")


MISFITS = {
    "wider": ([2, 3], [2], r"(?s)tower0/table.*\[2,3\] is not .* shape \[\?,2\]"),
    "more than indices": ([3, 2], [2], "of table:0 must have one row per index"),
    "flat": ([4], [2], r"(?s)tower0/table.*\[4\] is not compatible"),
    "at indices of rank 2": (
        *([2, 2], [2, 1]),
        r"\[2,1\] is not compatible with expected shape \[\?\]",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_rows_that_only_a_run_knows_are_compared_in_it(case):
    values, indices, message = MISFITS[case]

    def pairs():
        at = v1.placeholder_with_default(tf.zeros(indices, tf.int64), None)
        rows = tf.IndexedSlices(unknown(np.ones(values)), at)
        return [(rows, variable("table", [4, 2]))]

    fails_in_its_step(pairs, message)


SHAPES = [[], [1], [3], [2, 3], [15], [16], [17], [5, 7]]


@pytest.mark.slow
@pytest.mark.parametrize("inner", OPTIMIZERS)
def test_shapes_that_only_a_run_knows_give_what_known_ones_give(inner):
    def train(as_tensor):
        def pairs(replica):
            numbers = [np.arange(np.prod(s, dtype=int)).reshape(s) for s in SHAPES]
            dense = [
                (as_tensor(array + 10.0 * n + replica), variable(f"v{n}", shape))
                for n, (array, shape) in enumerate(zip(numbers, SHAPES, strict=True))
            ]
            rows = tf.IndexedSlices(
                as_tensor(np.ones([3, 2]) + replica),
                v1.placeholder_with_default(tf.constant([1, 3, replica]), [None]),
            )
            return [*dense, (rows, variable("table", [4, 2]))]

        def build(task):
            return make(task, pairs, inner=OPTIMIZERS[inner](), fuse_below_bytes=BELOW)

        def drive(replica, model, session):
            for _ in range(3):
                session.run(model.train)
            return session.run(model.values)

        return run_replicas(2, build, drive)[0]

    known = train(lambda array: tf.constant(array, tf.float32))
    for got, want in zip(train(unknown), known, strict=True):
        np.testing.assert_array_equal(got, want)

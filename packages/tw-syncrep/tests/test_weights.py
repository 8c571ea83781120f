"""Replicas with unlike numbers of rows make the step of one device with all rows."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import DEADLINE_S, run_replicas
from syncrep_given import make, run, vector

v1 = tf.compat.v1
SIZES = [3, 70]  # on both sides of what travels in a pack
OPTIONS = {"fuse_below_bytes": 64}


def rows(counts, size):
    """[rows, size] whole numbers: the gradient of each row."""
    random = np.random.default_rng(size)
    return random.integers(-8, 9, (sum(counts), size)).astype(np.float64)


def means_of(counts, replica, dtype):
    """Returns the replica's means over its rows: NaN where it has none."""
    first = sum(counts[:replica])
    means = []
    for n, size in enumerate(SIZES):
        own = rows(counts, size)[first : first + counts[replica]]
        mean = own.mean(axis=0) if len(own) else np.full(size, np.nan)
        v = v1.get_variable(f"v{n}", [size], dtype, v1.zeros_initializer())
        means.append((tf.constant(mean, dtype), v))
    return means


# Powers of two, of a power of two of rows: every mean is exact.
@pytest.mark.slow(by_day=["counts2-float32-None"])
@pytest.mark.parametrize(
    ("dtype", "compression"),
    [
        *[("float32", None), ("float32", tf.bfloat16)],
        *[("float64", None), ("float16", None)],
    ],
)
@pytest.mark.parametrize("counts", [(8, 8), (4, 2, 2), (0, 8), (2, 0, 2)])
def test_any_partition_makes_the_step_of_all_rows(counts, compression, dtype):
    def step(own, **options):
        return run(
            lambda r: means_of(own, r, dtype),
            replicas=len(own),
            aggregate=len(own),
            count=2,
            **options,
            **OPTIONS,
        )[1]

    got = step(
        counts,
        weight_of=lambda r: tf.constant(counts[r]),
        compression=compression,
    )
    for value, size in zip(got, SIZES, strict=True):
        want = -2 * rows(counts, size).mean(axis=0)
        np.testing.assert_array_equal(value, want)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.1, 3, 7.0])
def test_equal_weights_change_no_bit(weight):
    def grads(replica):
        random = np.random.default_rng(replica)
        return [
            (tf.constant(random.normal(size=size), tf.float32), vector(f"v{n}", size))
            for n, size in enumerate(SIZES)
        ]

    want = run(grads, **OPTIONS)[1]
    got = run(grads, weight_of=lambda _: weight, **OPTIONS)[1]
    for own, plain in zip(got, want, strict=True):
        np.testing.assert_array_equal(own, plain)


@pytest.mark.slow
def test_nobody_with_weight_gives_means_of_zero():
    def grads(_):
        return [(tf.fill([3], np.nan), vector(value=5.0))]

    step, values, _ = run(grads, weight_of=lambda _: 0)
    assert step == 1
    np.testing.assert_array_equal(values[0], [5.0] * 3)


@pytest.mark.slow
def test_a_dropped_gradient_does_not_weigh():
    """Replica 2 comes too late to the round that the others make."""
    started, begun, over = threading.Barrier(3), threading.Event(), threading.Event()

    def build(task):
        # It joins the chief's run: before that, it would join again at its first step.
        assert task.replica_index < 2 or begun.wait(DEADLINE_S)
        return make(
            task,
            lambda r: [(tf.fill([3], [8.0, 4.0, 1024.0][r]), vector())],
            total_num_replicas=3,
            weight_of=lambda r: [3, 1, 64][r],
        )

    def drive(replica, model, session):
        if replica == 0:
            begun.set()
        started.wait(DEADLINE_S)
        if replica == 2:
            assert over.wait(DEADLINE_S)
        session.run(model.train)
        over.set()
        # Once the late one has come, the next round takes it out of the queue.
        started.wait(DEADLINE_S)
        if replica < 2:
            session.run(model.train)
        return session.run(model.values), model.opt.status(session)

    values, status = run_replicas(3, build, drive)[0]
    assert status.dropped == 1
    np.testing.assert_array_equal(values[0], [-2 * 7.0] * 3)


@pytest.mark.slow
def test_a_weight_may_change_from_step_to_step():
    def build(task):
        weight = v1.placeholder(tf.float32, [])
        model = make(
            task,
            lambda r: [(tf.fill([3], [8.0, 4.0][r]), vector())],
            weight_of=lambda _: weight,
        )
        return SimpleNamespace(weight=weight, **vars(model))

    def drive(replica, model, session):
        seen = []
        for weights in ([1, 3], [3, 1], [0, 2]):
            session.run(model.train, {model.weight: weights[replica]})
            seen.append(session.run(model.values)[0])
        return seen

    seen = run_replicas(2, build, drive)[0]
    assert seen[-1][0] == -(5.0 + 7.0 + 4.0)

"""Towers with unlike numbers of rows train as one device does on all of them."""

import numpy as np
import pytest
import tensorflow as tf
from session_builders import SYNCHRONOUS, build, initialise, pairs_of

from tw_builders import SyncMultiGPUReplicatedBuilder, apply_shared_gradients
from tw_core import get_current_tower_context

CPUS = ["/cpu:0", "/cpu:1", "/cpu:2"]
# Powers of two, so that every mean is exact; one tower may have no rows.
COUNTS = [(4, 4), (2, 6), (0, 8), (2, 0, 6)]
SIZES = (3, 5_000)  # on both sides of what travels packed
each_count = pytest.mark.parametrize("counts", COUNTS)


def data(counts):
    """[rows, 3] and [rows] whole numbers."""
    random = np.random.default_rng(0)
    x = random.integers(-4, 5, (sum(counts), 3)).astype(np.float64)
    return x, random.integers(-4, 5, sum(counts)).astype(np.float64)


def loss_of(x, y, w, big):
    return tf.reduce_mean(
        (tf.linalg.matvec(x, w) + tf.reduce_sum(big) * 2**-12 - y) ** 2
    )


def parts(array, counts):
    return np.split(array, np.cumsum(counts)[:-1])


def train_in_graph(make_builder, counts, weights):
    x, y = data(counts)
    with tf.Graph().as_default(), tf.compat.v1.Session() as sess:
        builder = make_builder(CPUS[: len(counts)])
        xs, ys = parts(x, counts), parts(y, counts)

        def tower():
            k = get_current_tower_context().index
            w, big = [
                tf.compat.v1.get_variable(
                    name, [size], tf.float64, tf.compat.v1.zeros_initializer()
                )
                for name, size in zip(("w", "big"), SIZES, strict=True)
            ]
            return pairs_of(loss_of(xs[k], ys[k], w, big), [w, big])

        make = lambda: tf.compat.v1.train.MomentumOptimizer(2**-4, 0.5)  # noqa: E731
        grads, train_op, sync_op = build(builder, tower, make, **weights)
        initialise(sess)
        if sync_op is not None:
            sess.run(sync_op)
        for _ in range(3):
            sess.run(train_op)
        return [sess.run([v for _, v in pairs]) for pairs in grads]


BUILDERS = {"default": SyncMultiGPUReplicatedBuilder} | SYNCHRONOUS


@each_count
@pytest.mark.parametrize("name", BUILDERS)
def test_builders_weigh_towers_by_their_rows(name, counts):
    [want] = train_in_graph(BUILDERS["default"], (sum(counts),), {})
    got = train_in_graph(BUILDERS[name], counts, {"weights": counts})
    for own in got:
        for value, wanted in zip(own, want, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", BUILDERS)
def test_equal_weights_change_no_bit(name):
    want = train_in_graph(BUILDERS[name], (3, 3), {})
    got = train_in_graph(BUILDERS[name], (3, 3), {"weights": [0.1, 0.1]})
    for own, plain in zip(got, want, strict=True):
        for value, wanted in zip(own, plain, strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_a_function_weighs_towers_as_only_the_run_knows():
    """A mean with weights is tested where reducers are."""
    variables = [tf.Variable(tf.zeros([size], tf.float64)) for size in SIZES]
    descent = tf.compat.v1.train.GradientDescentOptimizer(1.0)

    @tf.function
    def step(weights):
        values = [tf.constant(own, tf.float64) for own in (2.0, 4.0, np.nan)]
        grads = [[(tf.fill(v.shape, own), v) for v in variables] for own in values]
        apply_shared_gradients(grads, descent, weights=tf.unstack(weights))

    # A tower of weight 0 does not count, whatever its gradients are.
    for weights, want in ([1, 3, 0], 3.5), ([2, 0, 0], 2.0), ([0, 0, 1], np.nan):
        before = [v.numpy() for v in variables]
        step(tf.constant(weights))
        for v, old in zip(variables, before, strict=True):
            np.testing.assert_array_equal(v, old - want)


def test_weights_of_a_sum_are_refused():
    def summing(devices):
        return SyncMultiGPUReplicatedBuilder(devices, average=False)

    with pytest.raises(ValueError, match="weights apply to a mean only; pass average"):
        train_in_graph(summing, (2, 2), {"weights": [1, 1]})

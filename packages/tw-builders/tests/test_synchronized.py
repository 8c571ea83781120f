"""Builders normalise by the whole batch; the oracle is one device on all rows."""

from functools import cache

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from session_builders import build, new_session, pairs_of

from tw_builders import (
    SyncMultiGPUParameterServerBuilder,
    SyncMultiGPUReplicatedBuilder,
    SyncMultiGPUShardedBuilder,
)
from tw_builders.tensorpack import get_sync_bn_mean_var
from tw_core import get_current_tower_context
from tw_core.synchronized import batch_normalization, synchronized_layers
from tw_core.testing import CPUS

v1 = tf.compat.v1
KEYS = v1.GraphKeys
STEPS = 2
SIZES = {"even": [6, 6], "uneven": [7, 1, 4], "one empty": [5, 0, 4, 3]}
X = np.random.default_rng(1).normal(3.0, 2.0, [12, 4])
NAMES = {"mean_name": "mean/EMA", "variance_name": "variance/EMA"}


def loss_of(x):
    kernel = v1.get_variable(
        "kernel", [4, 4], tf.float64, v1.constant_initializer(np.eye(4) + 0.1)
    )
    hidden = batch_normalization(x @ kernel, training=True, name="bn0", **NAMES)
    hidden += batch_normalization(
        tf.nn.softplus(hidden) @ kernel, training=True, name="bn1", **NAMES
    )
    return tf.reduce_sum((hidden - tf.sin(x)) ** 2)


def own_pairs(loss):
    context = get_current_tower_context()
    scope = context.vs_name if context is not None else ""
    variables = [v for v in v1.trainable_variables() if v.name.startswith(scope)]
    if not scope:
        variables = [v for v in variables if not v.name.startswith("tower")]
    return pairs_of(loss, variables)


def sgd():
    return v1.train.MomentumOptimizer(0.01, 0.5)


def trained(train_op, sync_op=None):
    """Returns the variables after some steps with their updates."""
    updates = v1.get_collection(KEYS.UPDATE_OPS)
    with new_session() as sess:
        if sync_op is not None:
            sess.run(sync_op)
        for _ in range(STEPS):
            sess.run([train_op, updates])
        return {v.op.name: sess.run(v) for v in v1.global_variables()}


@cache
def on_one_device():
    with tf.Graph().as_default():
        pairs = own_pairs(loss_of(tf.constant(X)))
        return trained(sgd().apply_gradients(pairs))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "make",
    [
        lambda devices: SyncMultiGPUReplicatedBuilder(
            devices, average=False, mode="cpu"
        ),
        lambda devices: SyncMultiGPUShardedBuilder(devices, average=False),
        lambda devices: SyncMultiGPUParameterServerBuilder(devices, ps_device="cpu"),
    ],
    ids=["replicated", "sharded", "parameter server"],
)
def test_builders_train_as_one_device_on_the_whole_batch(make, sizes):
    with tf.Graph().as_default():
        parts = tf.split(tf.constant(X), sizes)
        builder = make(list(CPUS[: len(sizes)]))
        # The parameter server takes the mean over towers.
        takes_mean = isinstance(builder, SyncMultiGPUParameterServerBuilder)
        scale = len(sizes) if takes_mean else 1

        def tower():
            return own_pairs(scale * loss_of(parts[get_current_tower_context().index]))

        got = trained(*build(builder, tower, sgd)[1:])
    want = on_one_device()
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-10, err_msg=name)


def test_tensorpacks_function_counts_towers_by_their_rows():
    with tf.Graph().as_default():
        parts = tf.split(tf.constant(X), [5, 0, 7])
        builder = SyncMultiGPUReplicatedBuilder(list(CPUS[:3]), True, "cpu")

        def tower():
            part = parts[get_current_tower_context().index]
            return get_sync_bn_mean_var(part, [0], "nccl")

        moments = builder.call_for_each_tower(tower)
        with new_session() as sess:
            for mean, variance in sess.run(moments):
                np.testing.assert_allclose(mean, X.mean(0), rtol=1e-12)
                np.testing.assert_allclose(variance, X.var(0), rtol=1e-12)


def test_layers_of_keras_2_find_the_sums_in_a_session_graph():
    layer = tf_keras.layers.BatchNormalization

    def total(x):
        return layer(synchronized=True, dtype="float64")(x, training=True)

    with tf.Graph().as_default():
        parts = tf.split(tf.constant(X), [5, 7])
        builder = SyncMultiGPUReplicatedBuilder(list(CPUS[:2]), True, "cpu")

        def tower():
            return total(parts[get_current_tower_context().index])

        with synchronized_layers():
            got = builder.call_for_each_tower(tower)
        want = total(tf.constant(X))
        with new_session() as sess:
            got, want = sess.run([got, want])
    np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-9)

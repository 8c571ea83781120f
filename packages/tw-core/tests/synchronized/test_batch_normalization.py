"""``get_variable`` code normalises by the whole batch.

The oracles are NumPy, one device on all rows, and TensorFlow 1's own layer. Towers of
session graphs are trained in tw-builders.
"""

import re
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from tf_keras.src.legacy_tf_layers import normalization as tensorflow_1

from tw_core import Replicated, Shared, VariableStore, map_towers, towers
from tw_core.synchronized import batch_normalization
from tw_core.testing import CPUS

v1 = tf.compat.v1
KEYS = v1.GraphKeys
X = np.random.default_rng(1).normal(3.0, 2.0, [12, 5, 5, 3])
SIZES = {"one empty": [7, 0, 5], "four": [1, 5, 2, 4], "one": [12]}
PARTS = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
POLICIES = pytest.mark.parametrize("policy", [Shared(), Replicated()], ids=repr)


def ours(total):
    return towers(list(CPUS[:total]))


def model(x):
    hidden = batch_normalization(x, training=True, momentum=0.8)
    start = v1.constant_initializer([0.5, -1.0, 0.75])
    kernel = v1.get_variable("kernel", [1, 1, 3, 1], tf.float64, start)
    hidden = tf.nn.conv2d(
        tf.nn.softplus(hidden), tf.tile(kernel, [1, 1, 1, 2]), 1, "SAME"
    )
    branch = batch_normalization(hidden, training=True, momentum=0.8)
    return tf.reduce_sum((hidden + tf.sin(branch)) ** 3) / 12


def train(policy, sizes):
    """Returns losses, gradients of rows, and the variables after the updates."""
    store = VariableStore(policy)

    @tf.function
    def step():
        def tower_fn(tower, x):
            with store.scope(tower), tf.GradientTape() as tape:
                tape.watch(x)
                loss = model(x)
            return loss, tape.gradient(loss, x)

        parts = tf.split(tf.constant(X), sizes)
        return map_towers(tower_fn, ours(len(sizes)), parts)

    results = tf.nest.map_structure(np.array, step())
    made = [v for tower in ours(len(sizes)) for v in store.variables(tower)]
    return results, {v.name: v.numpy() for v in made}


@pytest.mark.slow
@PARTS
@POLICIES
def test_towers_of_a_function_are_one_device_with_the_whole_batch(policy, sizes):
    ((want_loss, want_grad),), want_variables = train(Shared(), [12])
    results, variables = train(policy, sizes)
    losses, grads = zip(*results, strict=True)
    np.testing.assert_allclose(sum(losses), want_loss, rtol=1e-12)
    np.testing.assert_allclose(np.concatenate(grads), want_grad, rtol=1e-9, atol=1e-9)
    assert want_variables.keys() <= variables.keys()
    moments = ("mean", 0, X.mean((0, 1, 2))), ("variance", 1, X.var((0, 1, 2)))
    for name, start, moment in moments:
        got = variables[f"batch_normalization/moving_{name}:0"]
        np.testing.assert_allclose(got, 0.8 * start + 0.2 * moment, rtol=1e-12)
    for name, value in variables.items():
        of_one = want_variables[re.sub(r"^tower\d/", "", name)]
        np.testing.assert_allclose(value, of_one, rtol=1e-12, err_msg=name)


def test_one_device_has_the_variables_and_values_of_tensorflow_1s_layer(graph):
    # The fused kernel has its own variance, and takes no channels in front on a CPU.
    layer = partial(tensorflow_1.batch_normalization, fused=False)
    made = {}
    for scope, normalise in ("ours", batch_normalization), ("theirs", layer):
        with v1.variable_scope(scope):
            outputs = [
                normalise(
                    tf.constant(X[:6] if training else X[6:]),
                    training=training,
                    axis=1,
                    gamma_initializer=v1.constant_initializer(1.5),
                    beta_initializer=v1.constant_initializer(-2.0),
                    name=name,
                    reuse=reuse,
                )
                for name, training, reuse in (
                    ("bn", True, False),
                    ("bn", False, True),
                    (None, True, None),
                    (None, False, None),
                )
            ]
        names = [
            (v.name.removeprefix(f"{scope}/"), v.shape, v.dtype, v.trainable)
            for v in v1.global_variables(scope)
        ]
        made[scope] = (
            outputs,
            sorted(names, key=str),
            v1.get_collection(KEYS.UPDATE_OPS, scope),
        )
    assert made["ours"][1] == made["theirs"][1]
    with v1.Session() as sess:
        sess.run(v1.global_variables_initializer())
        ours, theirs = (sess.run(made[scope][0]) for scope in ("ours", "theirs"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        sess.run([made[scope][2] for scope in ("ours", "theirs")])
        ours, theirs = (sess.run(v1.global_variables(s)) for s in ("ours", "theirs"))
        for own, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32(graph, dtype):
    # The sum of the squares of 432 numbers of 300 is beyond float16.
    x = tf.cast(X * 300, dtype)
    y = batch_normalization(x, training=True, epsilon=0.0)
    assert y.dtype == dtype
    assert {v.dtype.base_dtype for v in v1.global_variables()} == {tf.float32}
    with v1.Session() as sess:
        sess.run(v1.global_variables_initializer())
        got, x = sess.run([tf.cast(y, tf.float64), tf.cast(x, tf.float64)])
    want = (x - x.mean((0, 1, 2))) / x.std((0, 1, 2))
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)


def test_variables_regularizers_and_names_are_those_asked_for(graph):
    x = tf.constant(X)
    batch_normalization(x, training=False, center=False, scale=False)
    assert not v1.trainable_variables()
    assert not v1.get_collection(KEYS.UPDATE_OPS)
    batch_normalization(
        x,
        training=True,
        trainable=False,
        name="bn",
        mean_name="mean/EMA",
        variance_name="variance/EMA",
        gamma_regularizer=lambda gamma: tf.reduce_sum(gamma, name="of_gamma"),
        beta_regularizer=lambda beta: tf.reduce_sum(beta, name="of_beta"),
    )
    assert not v1.trainable_variables()
    assert len(v1.get_collection(KEYS.REGULARIZATION_LOSSES)) == 2
    names = {v.op.name for v in v1.global_variables("bn/")}
    assert names == {f"bn/{n}" for n in ("gamma", "beta", "mean/EMA", "variance/EMA")}

"""Steps in functions that XLA compiles (``jit_compile=True``)."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tw_ampopt import DynamicLossScale, SimpleAdam, TowerOptimizer
from tw_core.testing import CPUS

# Two dense ones in a buffer, one alone; a small and a large table.
SHAPES = [(3,), (4, 4), (129, 130), (6, 3), (17_000, 2)]
KINDS = {
    "v1": "tf.train.AdamOptimizer",
    "legacy": tf_keras.optimizers.legacy.Adam,
    "keras": keras.optimizers.Adam,
    "simple": SimpleAdam,
}


def loss_of(variables, rows, factor):
    *dense, small, large = variables
    squares = tf.add_n([tf.reduce_sum(tf.square(v)) for v in dense])
    looked_up = tf.reduce_sum(tf.gather(small, rows)) + tf.reduce_sum(
        tf.square(tf.gather(large, rows))
    )
    return (squares + looked_up) * factor


def train(*, jit_compile, **arguments):
    """Takes seven steps, of which the third overflows."""
    variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
    optimizer = TowerOptimizer(
        variables,
        learning_rate=0.1,
        loss_scale=DynamicLossScale(),
        clip_by_global_norm=10.0,
        **arguments,
    )

    @tf.function(jit_compile=jit_compile)
    def step(rows, factor):
        with tf.GradientTape() as tape:
            loss = optimizer.apply_loss_scaling(loss_of(variables, rows, factor))
        return optimizer.apply(tape.gradient(loss, variables))

    for factor in (0.5, 1.0, np.inf, 2.0, 1.0, 0.25, 1.0):
        step(tf.constant([1, 4, 1]), tf.constant(factor))
    read = {name: value.numpy() for name, value in optimizer.statistics().items()}
    return [v.numpy() for v in variables], read


ACCUMULATES = {"accumulation_steps": 2}
DROPS = {**ACCUMULATES, "on_nonfinite": "drop_micro_batch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, o) for kind in KINDS for o in ({}, ACCUMULATES)), ("keras", DROPS)],
)
def test_a_compiled_step_of_one_tower_is_the_plain_one(kind, options):
    arguments = {"tf_optimizer": KINDS[kind], **options}
    want, want_read = train(jit_compile=False, **arguments)
    got, read = train(jit_compile=True, **arguments)
    assert want_read["updates"] >= 2
    norms = read.pop("global_norm"), want_read.pop("global_norm")
    # Of thousands of squares, which XLA adds in another order.
    np.testing.assert_allclose(*norms, rtol=5e-6)
    assert read == want_read
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_shape_that_the_compiler_finds_wrong_is_refused(sparse):
    w = tf.Variable(tf.ones([6, 2]))
    optimizer = TowerOptimizer([w])

    @tf.function(
        jit_compile=True,
        input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec([None], tf.int32)],
    )
    def step(values, rows):
        grad = tf.IndexedSlices(values, rows) if sparse else values
        return optimizer.apply([grad])

    good = tf.ones([3, 2]) if sparse else tf.ones([6, 2])
    step(good, tf.constant([1, 2, 1]))
    before = w.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.ones([3, 4]), tf.constant([1, 2, 1]))
    np.testing.assert_array_equal(w, before)


@pytest.mark.parametrize("method", ["apply", "apply_gradients", "nonfinite_gradients"])
def test_towers_on_two_devices_are_not_compiled(method):
    lists = []
    for device in CPUS[:2]:
        with tf.device(device):
            lists.append([tf.Variable([1.0, 2.0])])
    optimizer = TowerOptimizer(lists, name="T")

    @tf.function(jit_compile=True)
    def step():
        grads = [[tf.ones(2)] for _ in lists]
        if method == "apply_gradients":
            grads = [[(g, v)] for [g], [v] in zip(grads, lists, strict=True)]
        return getattr(optimizer, method)(grads)

    with pytest.raises(
        ValueError,
        match=r"XLA compiles .*got towers on \[.*CPU:0', '.*CPU:1'\]",
    ):
        step()


def test_on_a_gpu_the_scalars_cannot_be_read(monkeypatch):
    w = tf.Variable(tf.ones([3]))
    optimizer = TowerOptimizer([w], loss_scale=DynamicLossScale())
    monkeypatch.setattr(TowerOptimizer, "_devices", lambda self: {"/device:GPU:0"})
    for call in (optimizer.apply_loss_scaling, lambda x: optimizer.apply([[x]])):
        compiled = tf.function(call, autograph=False, jit_compile=True)
        with pytest.raises(ValueError, match="and call apply"):
            compiled(tf.ones([3]))
    optimizer.apply([tf.ones([3])])  # Uncompiled it works.

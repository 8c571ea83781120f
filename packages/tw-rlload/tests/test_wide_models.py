"""Models whose variables lie on both sides of what reducers pack, in both modes.

Reducers pack tensors below 4,096 elements, and others below 16,384.
"""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import replicate, towers
from tw_core.testing import CPUS
from tw_reduce import packed, sum_balanced
from tw_rlload import DeviceBatch, EpochFunction

v1 = tf.compat.v1
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 100)).astype(np.float32)
Y = RNG.standard_normal(16).astype(np.float32)
ROWS = np.int32(RNG.integers(0, 6000, 16))
# 20,000, 200, 8,000 and 40 elements, and an embedding of 12,000.
SHAPES = {"a": (100, 200), "b": (200,), "c": (200, 40), "d": (40,), "table": (6000, 2)}
WEIGHTS = {
    name: (RNG.standard_normal(shape) / 10).astype(np.float32)
    for name, shape in SHAPES.items()
}
COLUMNS = {"x": (np.float32, [100]), "y": (np.float32, []), "row": (np.int32, [])}
# The steps of two towers with four rows each.
STEPS = [[*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]]
REDUCERS = {
    "default": None,
    "packed": packed(partial(sum_balanced, devices=list(CPUS[:2])), below_bytes=16_384),
    "all packed": packed(
        partial(sum_balanced, devices=list(CPUS[:2])), below_bytes=1 << 32
    ),
}
OPTIMIZERS = {
    "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
}
KERAS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
}


def loss_of(weights, inputs):
    hidden = tf.tanh(inputs["x"] @ weights["a"] + weights["b"])
    predicted = tf.reduce_mean(hidden @ weights["c"] + weights["d"], 1)
    predicted += tf.reduce_sum(tf.gather(weights["table"], inputs["row"]), 1)
    return tf.reduce_mean(tf.square(predicted - inputs["y"]))


def on_one_device(optimizer):
    """Two epochs of eager steps on both towers' rows at once."""
    weights = {name: tf.Variable(value) for name, value in WEIGHTS.items()}
    for taken in STEPS * 2:
        rows = {"x": X[taken], "y": Y[taken], "row": ROWS[taken]}
        with tf.GradientTape() as tape:
            loss = loss_of(weights, rows)
        # Momentum goes on in rows that a step does not reach.
        grads = tape.gradient(loss, list(weights.values()))
        grads = [tf.convert_to_tensor(grad) for grad in grads]
        optimizer.apply_gradients(zip(grads, weights.values(), strict=True))
    return {name: variable.numpy() for name, variable in weights.items()}


def check(got, wanted):
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.full("graph-default-momentum")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.each_choice
def test_two_towers_train_as_one_device_does(make_trainer, reducer, optimizer):
    wanted = on_one_device(OPTIMIZERS[optimizer]())
    trainer = make_trainer(
        loss_of,
        WEIGHTS,
        COLUMNS,
        opt=OPTIMIZERS[optimizer],
        reducer=REDUCERS[reducer],
    )
    trainer.load([X, Y, ROWS])
    trainer.run_epochs(2)
    check(trainer.weights(), wanted)


class Wide(tf.Module):
    def __init__(self):
        super().__init__()
        self.by_name = {n: tf.Variable(v, name=n) for n, v in WEIGHTS.items()}


@pytest.mark.full("default-sgd")
@pytest.mark.parametrize("optimizer", KERAS)
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.each_choice
def test_keras_optimizers_train_as_on_one_device(reducer, optimizer):
    made = towers(list(CPUS[:2]))
    specs = {n: tf.TensorSpec([None, *s], d) for n, (d, s) in COLUMNS.items()}
    batch = DeviceBatch(made, specs, max_per_device_batch_size=4)
    models = replicate(made, lambda tower: Wide())
    function = EpochFunction(
        batch,
        lambda model, inputs: loss_of(model.by_name, inputs),
        models,
        [KERAS[optimizer]() for _ in made],
        reducer=REDUCERS[reducer],
    )
    batch.load([X, Y, ROWS])
    function.run_epochs(2)
    wanted = on_one_device(KERAS[optimizer]())
    for model in models:
        check(model.by_name, wanted)


def dense(tower):
    del tower
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((100,)), keras.layers.Dense(200), keras.layers.Dense(1)]
    )


@pytest.mark.full("0.5")
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_keras_model_with_one_large_layer_trains_as_on_one_device(clip):
    def squared(model, inputs):
        return tf.reduce_mean(tf.square(model(inputs["x"])[:, 0] - inputs["y"]))

    made = towers(list(CPUS[:2]))
    specs = {"x": tf.TensorSpec([None, 100]), "y": tf.TensorSpec([None])}
    batch = DeviceBatch(made, specs, max_per_device_batch_size=4)
    models = replicate(made, dense)
    optimizers = [keras.optimizers.Adam(0.01) for _ in made]
    function = EpochFunction(
        batch, squared, models, optimizers, grad_norm_clipping=clip
    )
    batch.load([X, Y])
    function.run_epochs(2)

    alone, optimizer = dense(None), keras.optimizers.Adam(0.01)
    for taken in STEPS * 2:
        with tf.GradientTape() as tape:
            loss = squared(alone, {"x": X[taken], "y": Y[taken]})
        grads = tape.gradient(loss, alone.trainable_variables)
        if clip:
            grads, _ = tf.clip_by_global_norm(grads, clip)
        optimizer.apply_gradients(zip(grads, alone.trainable_variables, strict=True))
    for model in models:
        for got, want in zip(
            model.trainable_variables, alone.trainable_variables, strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)

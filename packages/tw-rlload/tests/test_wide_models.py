"""Models whose variables lie on both sides of what reducers pack, in both modes.

Reducers pack tensors below 4,096 elements, and others below 16,384.
"""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core.testing import CPUS
from tw_reduce import packed, sum_balanced

v1 = tf.compat.v1
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 100)).astype(np.float32)
Y = RNG.standard_normal(16).astype(np.float32)
ROWS = np.int32(RNG.integers(0, 5, 16))  # repeated within and between towers
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
    "keras sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "keras ftrl": lambda: keras.optimizers.Ftrl(0.01),
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


@pytest.mark.full(
    "graph-default-momentum",
    "function-packed-keras sgd",
    "function-all packed-keras ftrl",
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("reducer", REDUCERS)
def test_two_towers_train_as_one_device_does(make_trainer, reducer, optimizer, request):
    if "graph" in request.node.name and "keras" in optimizer:
        pytest.skip("a session graph takes no Keras optimizer")
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
    got = trainer.weights()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-5)

"""tf.Module and Keras 3 models, flat or not, with all optimizers in a tf.function.

Two tables of the module have sparse gradients, whose rows repeat within and between
towers: one device on their dense sum is the oracle.
"""

from functools import cache, partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from function_ways import make_apply

from tw_core import LeastLoadedDeviceSetter, map_towers, replicate, towers
from tw_core.flat_variables import flatten
from tw_core.testing import CPUS
from tw_reduce import broadcast, mean, packed, sum_balanced

STEPS = 6
RATE = 0.002  # with 0.01, 5,000 units diverge
START = np.linspace(-0.8, 0.9, 16, dtype=np.float32).reshape(4, 4)
OUT = np.linspace(0.5, -0.7, 4, dtype=np.float32).reshape(4, 1)
KERNEL = np.linspace(-0.5, 0.5, 4 * 5_000, dtype=np.float32).reshape(4, 5_000)
LAST = np.linspace(0.001, -0.001, 5_000, dtype=np.float32).reshape(5_000, 1)
WIDE = np.linspace(-0.1, 0.1, 4 * 6_000, dtype=np.float32).reshape(4, 6_000)
# The last column of each batch: rows of the tables.
ROWS = np.float32([[1], [4], [1], [4], [4], [1], [4], [1]])


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.hidden = tf.Variable(START, name="hidden")
        self.bias = tf.Variable(tf.zeros([4]), name="bias")
        self.out = tf.Variable(OUT, name="out")
        self.wide = tf.Variable(WIDE, name="wide")
        # On both sides of the 4,096 elements from which packs leave a tensor alone.
        self.tables = [tf.Variable(tf.ones([n, 3])) for n in (6, 2_000)]

    def __call__(self, x):
        out = tf.tanh(x @ self.hidden + self.bias) @ self.out
        rows = [tf.gather(table, tf.cast(x[:, 3], tf.int32)) for table in self.tables]
        out += tf.reduce_sum(tf.add_n(rows) ** 2, 1, keepdims=True) * x[:, :1]
        return out + 0.001 * tf.reduce_sum(tf.tanh(x @ self.wide), 1, keepdims=True)


def keras_model():
    model = keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.Dense(4, "tanh", kernel_initializer=constant(START)),
            # 20,000 and 5,000 elements: on both sides of the packing threshold.
            keras.layers.Dense(5_000, "tanh", kernel_initializer=constant(KERNEL)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer=constant(LAST)),
        ]
    )
    return model


def constant(value):
    return lambda shape, dtype=None: tf.constant(value, dtype)


MODELS = {
    "tf.Module": Module,
    "keras": keras_model,
    "flat": partial(flatten, keras_model, below_bytes=20_000),
}
V1 = tf.compat.v1.train
OPTIMIZERS = {
    "v1 gradient descent": partial(V1.GradientDescentOptimizer, RATE),
    "v1 momentum": partial(V1.MomentumOptimizer, RATE, 0.9),
    "v1 adam": partial(V1.AdamOptimizer, 0.02),
    "v1 rmsprop": partial(V1.RMSPropOptimizer, RATE),
    "keras gradient descent": partial(keras.optimizers.SGD, RATE),
    "keras momentum": partial(keras.optimizers.SGD, RATE, momentum=0.9),
    "keras adam": partial(keras.optimizers.Adam, 0.02),
}


def batches():
    random = np.random.default_rng(7)
    for _ in range(STEPS):
        x = random.standard_normal((8, 3), np.float32)
        y = np.sin(x.sum(1, keepdims=True))
        yield tf.constant(np.concatenate([x, ROWS], 1)), tf.constant(y)


def gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def train(model, optimizer, num_towers, kind):
    """Returns the replicas and their optimizers; the function is traced once."""
    devices = CPUS[:num_towers]
    ours = towers(devices)
    if kind == "shared":
        setter = LeastLoadedDeviceSetter(CPUS[0], devices)
        with tf.variable_creator_scope(setter.create):
            replicas = [MODELS[model]()]
    else:
        replicas = replicate(ours, lambda tower: MODELS[model]())
    reducer = mean(packed(broadcast(partial(sum_balanced, devices=devices))))
    apply, optimizers = make_apply(kind, ours, OPTIMIZERS[optimizer], replicas, reducer)
    models = replicas * (num_towers if kind == "shared" else 1)

    @tf.function(autograph=False)
    def step(x, y):
        parts = tf.split(x, num_towers), tf.split(y, num_towers)
        apply(map_towers(lambda tower, *own: gradients(*own), ours, models, *parts))

    for x, y in batches():
        step(x, y)
    assert step.experimental_get_tracing_count() == 1
    return replicas, optimizers


def values(model):
    variables = getattr(model, "model", model).trainable_variables
    return [tf.convert_to_tensor(v).numpy() for v in variables]


@cache
def train_alone(model_name, optimizer_name):
    model, optimizer = MODELS[model_name](), OPTIMIZERS[optimizer_name]()
    variables = list(model.trainable_variables)
    if optimizer_name.startswith("v1"):
        variables = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    for x, y in batches():
        grads = map(tf.convert_to_tensor, gradients(model, x, y))
        optimizer.apply_gradients(zip(grads, variables, strict=True))
    assert all(np.abs(value).max() < 10 for value in values(model)), "diverged"
    return values(model)


@pytest.mark.parametrize("num_towers", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("model", "kind"),
    [(own, kind) for own in MODELS for kind in ("replicated", "shared", "sharded")],
)
def test_towers_reach_the_variables_of_one_device(model, optimizer, num_towers, kind):
    """Optimizers live on their tower, and step once a step."""
    replicas, optimizers = train(model, optimizer, num_towers, kind)
    want = train_alone("keras" if model == "flat" else model, optimizer)
    # Shared variables are on several devices, each with a flat variable of its own.
    flat = [v for v in replicas[0].trainable_variables if v.name.startswith("flat/")]
    assert bool(flat) == (model == "flat")
    assert (
        not flat or kind == "shared" or len(replicas[0].trainable_variables) < len(want)
    )
    for replica in replicas:
        for got, wanted in zip(values(replica), want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)
    for replica in replicas[1:]:
        for got, first in zip(values(replica), values(replicas[0]), strict=True):
            np.testing.assert_array_equal(got, first)
    if optimizer.startswith("keras"):
        assert [int(own.iterations) for own in optimizers] == [STEPS] * len(optimizers)
        if kind == "replicated":
            state = [{v.value.device[-1] for v in own.variables} for own in optimizers]
            assert state == [{str(tower)} for tower in range(num_towers)]

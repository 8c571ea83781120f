"""Models, data and optimizers on which a ``TowerModel`` is compared with one device.

All compute in float64, so that what differs differs by a fault and not by rounding.
"""

import functools
import os
from contextlib import contextmanager

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_keras import TowerModel

CPUS = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
# Where this is set, as the session ``nightly`` does, tests train every combination.
FULL = os.environ.get("TOWERS_TESTS") == "full"
ROWS = 33  # three batches of 10, and one of 3: with four towers one part is empty
KERAS = tuple(map(int, keras.__version__.split(".")[:2]))
# Steps in one call. Before 3.7 Keras loses batches at the end that are fewer.
STEPS = 2 if KERAS < (3, 7) else 3
OPTIONS = {"dtype": "float64"}
layers = keras.layers


def reducing(kind, reduction="mean_with_sample_weight", **options):
    """Makes a loss; skips where Keras lacks the reduction, as before 3.7 the means."""
    if KERAS < (3, 7) and reduction.startswith("mean"):
        pytest.skip(f"Keras {keras.__version__} has no reduction {reduction!r}")
    return kind(reduction=reduction, **options)


@contextmanager
def float64():
    """What Keras adds up in losses and metrics is of this dtype, too.

    The policy of layers is set as well: where none is, the first layer keeps the
    float type that it finds, for every layer of the process that is made later.
    """
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def mlp():
    return keras.Sequential(
        [
            keras.Input([6], dtype="float64"),
            layers.Dense(8, "relu", kernel_regularizer="l2", **OPTIONS),
            layers.Dense(900, "tanh", trainable=False, **OPTIONS),  # a large variable
            layers.Dense(3, **OPTIONS),
        ]
    )


def two_outputs():
    inputs = keras.Input([6], dtype="float64")
    hidden = layers.Dense(8, "relu", **OPTIONS)(inputs)
    outputs = {
        "a": layers.Dense(3, name="a", **OPTIONS)(hidden),
        "b": layers.Dense(1, name="b", **OPTIONS)(hidden),
    }
    return keras.Model(inputs, outputs)


def embedding():
    return keras.Sequential(
        [
            keras.Input([6], dtype="int64"),
            layers.Embedding(50, 4, **OPTIONS),
            layers.Flatten(**OPTIONS),
            layers.Dense(3, **OPTIONS),
        ]
    )


def convolutional():
    return keras.Sequential(
        [
            keras.Input([6], dtype="float64"),
            layers.Reshape([6, 1, 1], **OPTIONS),
            layers.Conv2D(4, [3, 1], activation="relu", **OPTIONS),
            layers.MaxPooling2D([2, 1], **OPTIONS),
            layers.Flatten(**OPTIONS),
            layers.Dense(3, **OPTIONS),
        ]
    )


def recurrent():
    return keras.Sequential(
        [
            keras.Input([6], dtype="float64"),
            layers.Reshape([6, 1], **OPTIONS),
            layers.GRU(5, **OPTIONS),
            layers.Dense(3, **OPTIONS),
        ]
    )


def normalised():
    return keras.Sequential(
        [
            keras.Input([6], dtype="float64"),
            layers.Dense(8, "relu", **OPTIONS),
            layers.BatchNormalization(synchronized=True, momentum=0.7, **OPTIONS),
            layers.Dense(5, "relu", **OPTIONS),
            layers.BatchNormalization(synchronized=True, momentum=0.7, **OPTIONS),
            layers.Dense(3, **OPTIONS),
        ]
    )


class Subclassed(keras.Model):
    """Its variables are made by the first batch."""

    def __init__(self):
        super().__init__(**OPTIONS)
        self.hidden = layers.Dense(8, "relu", **OPTIONS)
        self.out = layers.Dense(3, **OPTIONS)

    def call(self, inputs, training=None):
        return self.out(self.hidden(inputs))


class OwnLoss(Subclassed):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        own = super().compute_loss(x, y, y_pred, sample_weight, training)
        return own + tf.reduce_mean(tf.reduce_sum(y_pred**2, axis=1))


class TwoPlayers(keras.Model):
    """Two optimizers, of which the second sees what the first has updated."""

    def __init__(self):
        super().__init__(**OPTIONS)
        self.critic = self.player(1)
        self.maker = self.player(6)
        self.critic_loss = keras.metrics.Mean("critic_loss", **OPTIONS)
        self.rows = keras.metrics.Sum("rows", **OPTIONS)

    @staticmethod
    def player(width):
        inputs = keras.Input([6], dtype="float64")
        dense = layers.Dense(8, "relu", **OPTIONS)(inputs)
        return keras.Model(inputs, layers.Dense(width, **OPTIONS)(dense))

    @property
    def metrics(self):
        return [self.critic_loss, self.rows]

    def compile(self, critic_optimizer, maker_optimizer):
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.maker_optimizer = maker_optimizer

    def losses_of(self, real, noise):
        of_made = self.critic(self.maker(noise))
        fooled = tf.reduce_mean(tf.nn.softplus(-of_made))
        found = tf.reduce_mean(tf.nn.softplus(-self.critic(real)))
        return found + tf.reduce_mean(tf.nn.softplus(of_made)), fooled

    def train_step(self, data):
        real, noise = data
        variables = self.critic.trainable_variables
        with tf.GradientTape() as tape:
            critic_loss, _ = self.losses_of(real, noise)
        grads = tape.gradient(critic_loss, variables)
        self.critic_optimizer.apply_gradients(zip(grads, variables, strict=True))
        variables = self.maker.trainable_variables
        with tf.GradientTape() as tape:
            _, maker_loss = self.losses_of(real, noise)
        grads = tape.gradient(maker_loss, variables)
        self.maker_optimizer.apply(grads, variables)
        self.critic_loss.update_state(critic_loss)
        self.rows.update_state(tf.shape(real)[0])
        return {
            "critic_loss": self.critic_loss.result(),
            "rows": self.rows.result(),
            "maker_loss": maker_loss,
        }


MODELS = {
    "mlp": mlp,
    "two outputs": two_outputs,
    "embedding": embedding,
    "convolutional": convolutional,
    "recurrent": recurrent,
    "normalised": normalised,
    "subclassed": Subclassed,
    "own loss": OwnLoss,
    "two players": TwoPlayers,
}


def rows_of(y, rows):
    """Returns the first rows of a model's y."""
    return {k: v[:rows] for k, v in y.items()} if isinstance(y, dict) else y[:rows]


def data_for(name, rows=ROWS):
    """Returns x and y."""
    random = np.random.default_rng(0)
    x, labels = random.standard_normal([rows, 6]), random.integers(0, 3, rows)
    if name == "embedding":
        return random.integers(0, 50, [rows, 6]), labels
    if name == "two outputs":
        return x, {"a": labels, "b": x[:, :1]}
    if name == "two players":
        return x, random.standard_normal([rows, 6])
    return x, labels


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def settings_for(name, make_optimizer=adam):
    """Returns what ``compile`` takes."""
    if name == "two players":
        return {
            "critic_optimizer": make_optimizer(),
            "maker_optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
        }
    if name == "two outputs":
        return {
            "optimizer": make_optimizer(),
            "loss": {"a": cross_entropy(), "b": "mse"},
            "loss_weights": {"a": 1.0, "b": 0.3},
            "metrics": {"a": ["accuracy"], "b": ["mae"]},
        }
    return {
        "optimizer": make_optimizer(),
        "loss": cross_entropy(),
        "metrics": ["accuracy"],
        "weighted_metrics": ["sparse_categorical_crossentropy"],
    }


def on_one_device(name, make_optimizer=adam, compiled=None):
    """Makes the model, compiled for training on one device."""
    keras.utils.set_random_seed(0)
    one = MODELS[name]()
    if not one.built and name != "two players":
        one.predict(data_for(name)[0][:2], verbose=0)
    compile_as(one, name, make_optimizer, compiled)
    one.jit_compile = False
    return one


def over_towers(
    name, num_towers, weights, make_optimizer=adam, compiled=None, **options
):
    """Makes the model over towers, compiled, with these values."""
    many = TowerModel(MODELS[name], CPUS[:num_towers], **options)
    if not many.built and name != "two players":
        many.predict(data_for(name)[0][:2], verbose=0)
    compile_as(many, name, make_optimizer, compiled)
    many.set_weights(weights)
    return many


def compile_as(model, name, make_optimizer, compiled):
    settings = settings_for(name, make_optimizer)
    model.compile(**settings, **({} if name == "two players" else compiled or {}))


def pair(name, num_towers, make_optimizer=adam, compiled=None, **options):
    """Makes the model on one device and over towers, with the same values."""
    one = on_one_device(name, make_optimizer, compiled)
    return one, over_towers(
        name, num_towers, one.get_weights(), make_optimizer, compiled, **options
    )


def trained_pair(
    name, num_towers, make_optimizer=adam, *, compiled=(), held=0, **options
):
    """Trains the model on one device, once for all that ask, and over towers.

    Args:
      compiled: more (name, value) pairs that ``compile`` takes.
      held: rows of which the history has values, too.

    Returns:
      Both models, of which the first is not to be changed, and both histories.
    """
    first, one, want = _trained(name, make_optimizer, compiled, held)
    more = dict(compiled)
    many = over_towers(name, num_towers, first, make_optimizer, more, **options)
    return one, many, want, fit(many, name, **_validation(name, held))


@functools.cache
def _trained(name, make_optimizer, compiled, held):
    one = on_one_device(name, make_optimizer, dict(compiled))
    first = one.get_weights()
    return first, one, fit(one, name, **_validation(name, held))


def _validation(name, held):
    x, y = data_for(name)
    return {"validation_data": (x[:held], rows_of(y, held))} if held else {}


def fit(model, name, **options):
    """Trains for three epochs; returns the history."""
    x, y = data_for(name)
    given = {"batch_size": 10, "epochs": 3, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, **given).history


def check_same(one, many, rtol=1e-9):
    """Compares two histories."""
    assert one.keys() == many.keys()
    for name in one:
        np.testing.assert_allclose(many[name], one[name], rtol=rtol, err_msg=name)


def seeded(make, seed=1):
    """Returns a function that makes the same model each time."""

    def made():
        keras.utils.set_random_seed(seed)
        return make()

    return made


def towers_of(make, num_towers, **options):
    """Makes the model that ``seeded(make)`` makes, over towers."""
    return TowerModel(seeded(make), CPUS[:num_towers], **options)


def check_near(results, wanted, tolerance=2e-6):
    """Compares nests of arrays."""
    tf.nest.map_structure(
        lambda one, other: np.testing.assert_allclose(one, other, tolerance, tolerance),
        results,
        wanted,
    )


def check_same_weights(one, many, rtol=1e-6, atol=1e-9):
    for own, plain in zip(many.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(own, plain, rtol=rtol, atol=atol)

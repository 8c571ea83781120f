"""Models, data and optimizers on which a ``TowerModel`` is compared with one device.

All compute in float64, so that what differs differs by a fault and not by rounding.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

from tw_keras import TowerModel

CPUS = ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
ROWS = 33  # three batches of 10, and one of 3: with four towers one part is empty
KERAS = tuple(map(int, keras.__version__.split(".")[:2]))
STEPS = 3  # in one call; an epoch ends with fewer
OPTIONS = {"dtype": "float64"}
layers = keras.layers


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


def norm():
    return layers.BatchNormalization(synchronized=True, momentum=0.7, **OPTIONS)


class Block(layers.Layer):
    """A synchronised layer inside of another one."""

    def __init__(self):
        super().__init__(**OPTIONS)
        self.norm = norm()

    def build(self, shape):
        self.norm.build(shape)

    def call(self, inputs, training=None):
        return self.norm(inputs, training=training)


def normalised():
    dense = [layers.Dense(n, **OPTIONS) for n in (8, 5, 3)]
    inputs = keras.Input([6], dtype="float64")
    return keras.Sequential([inputs, dense[0], norm(), dense[1], Block(), dense[2]])


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


def descend(optimizer, tape, loss, variables):
    grads = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(grads, variables, strict=True))


class Stepping(keras.Model):
    """Trains a part, or all, on ``loss_of``, and tracks the loss by rows."""

    part, more_metrics = "", ()

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.tracker, *self.more_metrics]

    def track(self, tracker, value, data):
        rows = tf.shape(tf.nest.flatten(data)[0])[0]
        tracker.update_state(value, sample_weight=rows)

    def loss_of(self, data):
        raise NotImplementedError

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        trained = getattr(self, self.part) if self.part else self
        descend(self.optimizer, tape, loss, trained.trainable_variables)
        self.track(self.tracker, loss, data)
        return {own.name: own.result() for own in self.metrics}

    def test_step(self, data):
        self.track(self.tracker, self.loss_of(data), data)
        return {own.name: own.result() for own in self.metrics}


MODELS = {
    "mlp": mlp,
    "two outputs": two_outputs,
    "embedding": embedding,
    "normalised": normalised,
    "subclassed": Subclassed,
    "own loss": OwnLoss,
}


def data_for(name, rows=ROWS):
    """Returns x and y."""
    random = np.random.default_rng(0)
    x, labels = random.standard_normal([rows, 6]), random.integers(0, 3, rows)
    if name == "embedding":
        return random.integers(0, 50, [rows, 6]), labels
    if name == "two outputs":
        return x, {"a": labels, "b": x[:, :1]}
    return x, labels


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def settings_for(name, make_optimizer=adam):
    """Returns what ``compile`` takes."""
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
    if not one.built:
        one.predict(data_for(name)[0][:2], verbose=0)
    one.compile(**settings_for(name, make_optimizer), **(compiled or {}))
    one.jit_compile = False
    return one


def over_towers(
    name, num_towers, weights, make_optimizer=adam, compiled=None, **options
):
    """Makes the model over towers, compiled, with these values."""
    many = TowerModel(MODELS[name], CPUS[:num_towers], **options)
    if not many.built:
        many.predict(data_for(name)[0][:2], verbose=0)
    many.compile(**settings_for(name, make_optimizer), **(compiled or {}))
    many.set_weights(weights)
    return many


def pair(name, num_towers, make_optimizer=adam, compiled=None, **options):
    """Makes the model on one device and over towers, with the same values."""
    one = on_one_device(name, make_optimizer, compiled)
    return one, over_towers(
        name, num_towers, one.get_weights(), make_optimizer, compiled, **options
    )


def trained_pair(name, num_towers, make_optimizer=adam, split=0.0, **options):
    """Trains the model on one device, once for all that ask, and over towers.

    Returns both models, of which the first is not to be changed, and both histories,
    which have values of the last rows, too, if ``split`` is the share of those.
    """
    first, one, want = _trained(name, make_optimizer, split)
    many = over_towers(name, num_towers, first, make_optimizer, **options)
    return one, many, want, fit(many, name, validation_split=split)


@functools.cache
def _trained(name, make_optimizer, split):
    one = on_one_device(name, make_optimizer)
    return one.get_weights(), one, fit(one, name, validation_split=split)


def fit(model, name, **options):
    """Trains for three epochs; returns the history."""
    x, y = data_for(name)
    given = {"batch_size": 10, "epochs": 3, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, **given).history


def check_same(one, many, rtol=1e-9):
    """Compares two histories, or other nests."""
    check_near(many, one, rtol)


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


def check_same_weights(one, many, rtol=1e-6):
    check_near(many.get_weights(), one.get_weights(), rtol)

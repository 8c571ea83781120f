"""Steps that differentiate one loss per row, and what else they log."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS, check_near

from tw_keras import TowerModel

layers = keras.layers
X = np.random.default_rng(0).normal(size=(12, 3))  # batches of 5, 5 and 2 rows
pytestmark = pytest.mark.usefixtures("in_float64")

LOGGED = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_mean,
    "mean of Keras": keras.ops.mean,
    "sums": lambda losses: 0.5 * tf.reduce_sum(losses) - tf.reduce_sum(2 * losses),
    "mean and number": lambda losses: 2 * tf.reduce_mean(losses) + 1,
    "number": lambda losses: tf.constant(3.0, losses.dtype),
    "sum of means": lambda losses: tf.reduce_sum(
        tf.reduce_mean(losses[:, None] * tf.ones([1, 2], losses.dtype), axis=0)
    ),
    "mean of sums": lambda losses: tf.reduce_mean(
        tf.reduce_sum(losses[:, None] * tf.ones([1, 2], losses.dtype), axis=-1)
    ),
    "over its rows": lambda losses: (
        tf.reduce_sum(losses) / tf.cast(tf.shape(losses)[0], losses.dtype)
    ),
    "Keras's loss": lambda losses: keras.losses.MeanSquaredError()(
        losses[:, None], tf.zeros_like(losses)[:, None]
    ),
    "Python's sum": lambda losses: sum([tf.reduce_sum(losses)] * 2),
}
UNCLEAR = {
    "sum and number": lambda losses: tf.reduce_sum(losses) + 1,
    "sum and mean": lambda losses: tf.reduce_sum(losses) + tf.reduce_mean(losses),
    "root": lambda losses: tf.sqrt(tf.reduce_mean(losses)),
    "over a number": lambda losses: tf.reduce_sum(losses) / 5,
}


class PerRow(keras.Model):
    """Differentiates one loss per row, and logs a number, or tracks it."""

    def __init__(self, logged, tracks):
        super().__init__()
        self.inner = layers.Dense(2, kernel_initializer="ones")
        self.logged, self.tracks = logged, tracks
        self.tracker, self.rows = (keras.metrics.Mean(n) for n in ("loss", "rows"))

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum((self(data[0]) - data[1]) ** 2, axis=-1)
        variables = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(losses, variables), variables)
        loss = self.logged(losses)
        self.rows.update_state(losses)
        if self.tracks:
            self.tracker.update_state(loss)
            loss = self.tracker.result()
        rate = self.optimizer.learning_rate
        more = {"rate": rate, "same": tf.convert_to_tensor(rate)}
        return {"loss": loss, "rows": self.rows.result(), **more}


def trained(model):
    model.compile(keras.optimizers.SGD(0.01))
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(X, X[:, :2], **options).history, model.get_weights()


@pytest.mark.slow(
    by_day=[
        "2-replicated-False-sum",
        "2-replicated-False-mean of sums",
        "3-sharded-True-mean",
        "2-parameter_server-False-mean of Keras",
    ]
)
@pytest.mark.parametrize("logged", LOGGED)
@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize(
    ("num_towers", "variables"),
    [(2, "replicated"), (3, "sharded"), (2, "parameter_server")],
)
def test_what_is_logged_is_that_of_one_device(logged, tracks, num_towers, variables):
    def make():
        return PerRow(LOGGED[logged], tracks)

    many = TowerModel(
        make, CPUS[:num_towers], variables=variables, loss_reduction="sum"
    )
    check_near(trained(many), trained(make()), 1e-9)


@pytest.mark.parametrize("logged", UNCLEAR)
@pytest.mark.parametrize("tracks", [False, True])
def test_what_may_be_a_sum_or_a_mean_is_refused(logged, tracks):
    def make():
        return PerRow(UNCLEAR[logged], tracks)

    what = "passes to 'loss'" if tracks else "the logged 'loss'"
    with pytest.raises(ValueError, match=f"{what} must be a sum or a mean over rows"):
        trained(TowerModel(make, CPUS[:2], loss_reduction="sum"))
    one = TowerModel(make, CPUS[:1], loss_reduction="sum")
    check_near(trained(one), trained(make()), 1e-9)


class OfBoth(PerRow):
    """One optimizer's loss is per row, the other's a mean."""

    def __init__(self):
        super().__init__(tf.reduce_mean, False)
        self.other = layers.Dense(2, kernel_initializer="ones")
        self.second = keras.optimizers.SGD(0.1, name="second")

    def train_step(self, data):
        logs = super().train_step(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.other(data[0]) - data[1]) ** 2)
        variables = self.other.trainable_variables
        self.second.apply(tape.gradient(loss, variables), variables)
        return logs | {"other": loss}


def test_several_optimizers_are_refused():
    model = TowerModel(OfBoth, CPUS[:2], loss_reduction="sum")
    says = "holds for all optimizers, .*of each of .*, second are sums over rows"
    with pytest.raises(ValueError, match=says):
        trained(model)
    one = TowerModel(OfBoth, CPUS[:1], loss_reduction="sum")
    check_near(trained(one), trained(OfBoth()), 1e-9)

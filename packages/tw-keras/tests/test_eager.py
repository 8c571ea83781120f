"""``run_eagerly`` trains as one device, whatever a step does with the whole model."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import check_near, seeded, towers_of

layers, optimizers = keras.layers, keras.optimizers
X = np.random.default_rng(0).normal(size=(22, 5)).astype("float32")
OPTIONS = {
    "replicated": {},
    "sharded": {"variables": "sharded"},
    "shared": {"variables": "parameter_server"},
}


class Steps(keras.Sequential):
    """Applies in a loop of TensorFlow, which no trace for all towers can follow."""

    def train_step(self, data):
        x, y = data
        losses = []
        for _ in tf.range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            losses.append(loss)
        seen = self.compute_metrics(x, y, self(x), None)
        return {**seen, "loss": losses[1], "rows": float(len(x))}


def model_of(kind):
    return kind(
        [
            keras.Input([5]),
            layers.Dense(3, "tanh", name="a", kernel_regularizer="l2"),
            layers.BatchNormalization(synchronized=True),
            layers.Dropout(0.2, seed=1),
            layers.Dense(1),
        ]
    )


def trained(kind, num_towers=None, **options):
    make = partial(model_of, kind)
    many = num_towers and towers_of(make, num_towers, **options)
    model = many or seeded(make)()

    def loss(y, p):
        kernel = model.get_layer("a").kernel  # of the outer model
        return keras.ops.mean((y - p) ** 2, -1) + 0.3 * keras.ops.sum(kernel**2)

    model.compile(optimizers.Adam(0.01), loss, metrics=["mae"], run_eagerly=True)
    given = {"batch_size": 9, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(X, X[:, :1], validation_split=0.1, **given).history
    return model, [history, model.get_weights(), model.predict(X, verbose=0)]


@pytest.mark.slow
@pytest.mark.parametrize("num_towers", [1, 2, 3, 4])
@pytest.mark.parametrize("variables", OPTIONS)
@pytest.mark.parametrize("kind", [keras.Sequential, Steps])
def test_eager_steps_are_those_of_one_device(kind, variables, num_towers):
    model, many = trained(kind, num_towers, **OPTIONS[variables])
    _, one = trained(kind)
    check_near(many, one, 0.0 if variables in ("replicated", "shared") else 1e-6)
    for tower in model.towers[1:]:
        check_near(tower.get_weights(), model.get_weights(), 0.0)

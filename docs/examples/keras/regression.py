"""Predicts the course of diabetes from ten measurements of a patient.

Severe cases are rare. Each row has a weight, so that rare cases together count as much
as common ones.
"""

from gallery import devices, run

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_diabetes

from tw_keras import TowerModel  # plain Keras: no such line


def make_model():
    return keras.Sequential(
        [
            keras.Input([10]),
            layers.Dense(32, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(1),
        ]
    )


def load(rows, seed):
    x, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))[:rows]
    x, y = x[order], y[order]
    counts, edges = np.histogram(y, bins=8)
    weights = 1 / counts[np.digitize(y, edges[1:-1])]
    return x / x.std(0), (y - y.mean()) / y.std(), weights / weights.mean()


def main(towers=2, epochs=20, rows=442, seed=0):
    x, y, weights = load(rows, seed)
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(
        optimizer=keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
        loss="mse",
        metrics=["mae"],
        weighted_metrics=["mae"],
    )
    options = {"batch_size": 32, "validation_split": 0.2, "verbose": 0}
    return model.fit(x, y, sample_weight=weights, epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

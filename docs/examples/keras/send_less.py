"""Reads handwritten digits, with towers that send less than their gradients.

The part that is not sent in one step is kept, and sent in a later one.
"""

from gallery import devices, reducers, run

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from tw_keras import TowerModel  # plain Keras: no such line


def make_model():
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def train(own, towers, epochs, x, y):
    model = TowerModel(make_model, devices(towers), **own)  # plain Keras: make_model()
    decay = keras.optimizers.schedules.CosineDecay(2e-3, epochs * len(x) * 4 // 5 // 32)
    model.compile(
        optimizer=keras.optimizers.Adam(decay),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    options = {"batch_size": 32, "validation_split": 0.2, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options).history


def main(towers=2, epochs=20, rows=1797, seed=0):
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))[:rows]
    x, y = digits.images[order, ..., None] / 16, digits.target[order]
    history = {}
    for name, reducer in reducers().items():
        keras.utils.set_random_seed(seed)
        found = train({"reducer": reducer}, towers, epochs, x, y)
        history |= {f"{name}: {kind}": values for kind, values in found.items()}
    return history


if __name__ == "__main__":
    run(main, __file__)

"""Reads handwritten digits in float16, with variables in float32.

Keras scales the loss itself under this policy, and skips steps whose gradients are not
finite.
"""

from gallery import devices, run

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from tw_keras import TowerModel  # plain Keras: no such line


def make_model():
    return keras.Sequential(
        [
            keras.Input([64]),
            layers.Dense(128, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, dtype="float32"),
        ]
    )


def main(towers=2, epochs=12, rows=1797, seed=0):
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))[:rows]
    x, y = digits.data[order] / 16, digits.target[order]
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy("mixed_float16")
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    options = {"batch_size": 32, "validation_split": 0.2, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

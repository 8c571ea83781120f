"""Reads handwritten digits with a convolutional network.

Batch normalisation is synchronised: it uses the whole batch, over all towers.
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
            keras.Input([8, 8, 1]),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def load(rows, seed):
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))[:rows]
    return digits.images[order, ..., None] / 16, digits.target[order]


def main(towers=2, epochs=12, rows=1797, seed=0):
    x, y = load(rows, seed)
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    options = {"batch_size": 32, "validation_split": 0.2, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

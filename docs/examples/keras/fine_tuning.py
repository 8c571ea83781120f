"""Learns digits below five, then the others with the features of the first.

The features are frozen until the new head is trained, and then trained with it at a
small learning rate.
"""

from gallery import devices, run

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from tw_keras import TowerModel  # plain Keras: no such line


def make_model():
    features = [
        keras.Input([8, 8, 1]),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Conv2D(32, 3, activation="relu"),
        layers.GlobalMaxPooling2D(),
    ]
    network = keras.Sequential(features, name="features")
    return keras.Sequential([keras.Input([8, 8, 1]), network, layers.Dense(10)])


def train(model, x, y, epochs, rate):
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    options = {"batch_size": 32, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options).history


def main(towers=2, epochs=6, rows=1797, seed=0):
    digits = load_digits()
    x, y = digits.images[:rows, ..., None] / 16, digits.target[:rows]
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    phases = [train(model, x[y < 5], y[y < 5], epochs, 3e-3)]
    model.get_layer("features").trainable = False
    phases.append(train(model, x[y >= 5], y[y >= 5], epochs, 1e-2))
    model.get_layer("features").trainable = True
    phases.append(train(model, x[y >= 5], y[y >= 5], epochs, 1e-3))
    return {name: np.concatenate([own[name] for own in phases]) for name in phases[0]}


if __name__ == "__main__":
    run(main, __file__)

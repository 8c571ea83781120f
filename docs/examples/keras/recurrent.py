"""Predicts how a wave continues, with a recurrent network.

A wave is the sum of two sines of different frequencies, with a little noise.
"""

from gallery import devices, run

import keras
import numpy as np
from keras import layers

from tw_keras import TowerModel  # plain Keras: no such line

LENGTH = 24


def make_model():
    return keras.Sequential(
        [keras.Input([LENGTH, 1]), layers.GRU(16), layers.Dense(1)],
    )


def waves(rows, seed):
    random = np.random.default_rng(seed)
    frequency = random.uniform(0.1, 0.6, [2, rows, 1])
    phase = random.uniform(0, 2 * np.pi, [2, rows, 1])
    values = np.sin(frequency * np.arange(LENGTH + 1) + phase).sum(0)
    values += 0.05 * random.standard_normal(values.shape)
    return values[:, :-1, None], values[:, -1:]


def main(towers=2, epochs=8, rows=2000, seed=0):
    x, y = waves(rows, seed)
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, clipnorm=1.0), loss="mse", metrics=["mae"]
    )
    options = {"batch_size": 50, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

"""Sorts sequences of digits with a small transformer.

Each position of the output attends to the whole input, and predicts its digit of the
sorted sequence.
"""

from gallery import devices, run

import keras
import numpy as np
from keras import layers

from tw_keras import TowerModel  # plain Keras: no such line

LENGTH, WIDTH = 8, 32


class Positions(layers.Layer):
    """Adds a learned vector to every position."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=shape[1:], initializer="uniform")

    def call(self, x):
        return x + self.vectors


def block(x):
    attended = layers.MultiHeadAttention(num_heads=4, key_dim=WIDTH // 4)(x, x)
    x = layers.LayerNormalization()(x + attended)
    hidden = layers.Dense(2 * WIDTH, activation="gelu")(x)
    return layers.LayerNormalization()(x + layers.Dense(WIDTH)(hidden))


def make_model():
    digits = keras.Input([LENGTH], dtype="int64")
    x = block(Positions()(layers.Embedding(10, WIDTH)(digits)))
    return keras.Model(digits, layers.Dense(10)(x))


def main(towers=2, epochs=8, rows=3000, seed=0):
    x = np.random.default_rng(seed).integers(0, 10, [rows, LENGTH])
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    options = {"batch_size": 50, "verbose": 0}
    return model.fit(x, np.sort(x), epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

"""Classifies lines of documentation as NumPy's or TensorFlow's.

The texts are both packages' docstrings. Words become vectors, and their mean over a
line is classified.
"""

from gallery import devices, run

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tw_keras import TowerModel  # plain Keras: no such line

WORDS, LENGTH = 2000, 16


def make_model():
    return keras.Sequential(
        [
            keras.Input([LENGTH], dtype="int64"),
            layers.Embedding(WORDS, 16, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dropout(0.3),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )


def lines_of(module):
    texts = [getattr(module, name).__doc__ or "" for name in sorted(dir(module))]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in dict.fromkeys(lines) if len(line.split()) > 5]


def load(rows, seed):
    lines = lines_of(np), [*lines_of(tf), *lines_of(tf.math), *lines_of(tf.linalg)]
    each = min(rows // 2, *map(len, lines))
    random = np.random.default_rng(seed)
    chosen = np.concatenate([random.permutation(own)[:each] for own in lines])
    order = random.permutation(2 * each)
    to_numbers = layers.TextVectorization(WORDS, output_sequence_length=LENGTH)
    to_numbers.adapt(chosen)
    return to_numbers(chosen[order]).numpy(), np.repeat([0, 1], each)[order]


def main(towers=2, epochs=8, rows=4000, seed=0):
    x, y = load(rows, seed)
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)],
    )
    options = {"batch_size": 50, "validation_split": 0.2, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

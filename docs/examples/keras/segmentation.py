"""Classifies every pixel: part of a disc, of a square, or of neither.

Convolutions shrink the image and enlarge it again; the second half also receives the
first half's features of the same size. Batch normalisation is synchronised.
"""

from gallery import devices, run

import keras
import numpy as np
from keras import layers

from tw_keras import TowerModel  # plain Keras: no such line

SIZE = 16


def convolve(x, filters, kind=layers.Conv2D, strides=1):
    x = kind(filters, 3, strides=strides, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization(synchronized=True)(x))


def make_model():
    image = keras.Input([SIZE, SIZE, 1])
    large = convolve(image, 8)
    small = convolve(convolve(large, 16, strides=2), 16)
    again = convolve(small, 8, layers.Conv2DTranspose, strides=2)
    joined = layers.Concatenate()([large, again])
    return keras.Model(image, layers.Conv2D(3, 1)(joined))


def shapes(rows, seed):
    random = np.random.default_rng(seed)
    places = np.stack(np.meshgrid(range(SIZE), range(SIZE), indexing="ij"), -1)
    labels = np.zeros([rows, SIZE, SIZE], np.int64)
    for own in labels:
        disc, square = (abs(places - random.uniform(3, SIZE - 3, 2)) for _ in range(2))
        own[square.max(-1) < 3.2] = 2
        own[(disc**2).sum(-1) < 12] = 1
    images = (labels > 0) + 0.2 * random.standard_normal(labels.shape)
    return images[..., None], labels


def main(towers=2, epochs=8, rows=600, seed=0):
    x, y = shapes(rows, seed)
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    options = {"batch_size": 32, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

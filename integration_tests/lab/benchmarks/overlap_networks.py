"""Two networks of 20 million parameters, whose exchange a backward pass may hide."""

import keras
import numpy as np

layers = keras.layers
CHANNELS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # and convolutions
WIDE, CLASSES, SIDE = 8_192, 100, 32
BLOCKS, WIDTH, HEADS, HIDDEN, WORDS, LENGTH = 6, 512, 8, 2_048, 2_000, 64


def make_network(name: str) -> keras.Model:
    """Makes a network with logits of ``CLASSES``."""
    if name == "convolutional":
        x = inputs = keras.Input([SIDE, SIDE, 3])
        for channels, count in CHANNELS:
            for _ in range(count):
                x = layers.Conv2D(channels, 3, padding="same", activation="relu")(x)
            x = layers.MaxPool2D()(x)
        x = layers.Dense(WIDE, "relu")(layers.Flatten()(x))
    else:
        inputs = keras.Input([LENGTH], dtype="int32")
        x = layers.Embedding(WORDS, WIDTH)(inputs)
        for _ in range(BLOCKS):
            own = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x)
            x = layers.LayerNormalization()(x + own)
            hidden = layers.Dense(HIDDEN, "relu")(x)
            x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(hidden))
        x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def make_data(name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows for a network, and their classes."""
    random = np.random.default_rng(0)
    classes = random.integers(0, CLASSES, rows)
    if name == "convolutional":
        return random.normal(size=[rows, SIDE, SIDE, 3]).astype("float32"), classes
    return random.integers(0, WORDS, [rows, LENGTH]).astype("int32"), classes

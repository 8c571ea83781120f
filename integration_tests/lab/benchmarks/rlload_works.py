"""The batches and models of the benchmark rlload, and their expected results."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

MINIBATCHES = 32
RATE = 1e-3


@dataclass(frozen=True)
class Work:
    """A batch and a model for it."""

    name: str  # as shown
    rows: int  # of the batch
    shape: tuple[int, ...]  # of one row
    dtype: str  # of the rows
    widths: tuple[int, ...]  # of hidden layers; none for a linear model

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Makes the batch; x starts at no multiple of 64 bytes."""
        random = np.random.default_rng(0)
        size = (self.rows, *self.shape)
        x = unaligned(size, self.dtype)
        if self.dtype == "uint8":
            x[:] = random.integers(0, 256, size, np.uint8)
        else:
            x[:] = random.standard_normal(size, np.float32)
        return x, random.standard_normal(self.rows).astype(np.float32)

    def weights(self) -> list[np.ndarray]:
        """Makes the first weights."""
        random = np.random.default_rng(1)
        sizes = [self.features, *self.widths, 1]
        return [
            (random.standard_normal(pair) / np.sqrt(pair[0])).astype(np.float32)
            for pair in pairwise(sizes)
        ]

    @property
    def is_vectors(self) -> bool:
        """Whether a row is a vector; else it is an image."""
        return len(self.shape) == 1

    @property
    def features(self) -> int:
        """Numbers that the model reads of a row."""
        return self.shape[0] if self.is_vectors else 4 * 4 * self.shape[-1]

    def loss(self, weights: list[Any], x: Any, y: Any) -> Any:
        """Squared error; of an image, a few pixels are looked at."""
        if not self.is_vectors:
            x = tf.cast(x[:, ::21, ::21], tf.float32) / 255.0
            x = tf.reshape(x, [-1, self.features])
        for weight in weights[:-1]:
            x = tf.tanh(x @ weight)
        return tf.reduce_mean(tf.square((x @ weights[-1])[:, 0] - y))

    @property
    def step(self) -> int:
        """Rows of a minibatch."""
        return self.rows // MINIBATCHES


WORKS = {
    "vectors": Work("40,000 x 17 float32, linear", 40_000, (17,), "float32", ()),
    "vectors-mlp": Work(
        "40,000 x 17 float32, 2 x 64 tanh", 40_000, (17,), "float32", (64, 64)
    ),
    "images": Work(
        "4,000 x 84 x 84 x 4 uint8, linear", 4_000, (84, 84, 4), "uint8", ()
    ),
}


def unaligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Makes an array that starts one item past a multiple of 64 bytes."""
    item = np.dtype(dtype).itemsize
    size = int(np.prod(shape)) * item
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + item
    return memory[start : start + size].view(dtype).reshape(shape)


def reference_of_towers(work: Work) -> list[np.ndarray]:
    """Takes the 32 steps in NumPy, each on rows from both halves of the batch."""
    part = work.step // 2
    half = part * MINIBATCHES
    starts = range(0, half, part)
    order = [np.r_[s : s + part, half + s : half + s + part] for s in starts]
    return reference(work, np.concatenate(order))


def reference(work: Work, order: np.ndarray | None = None) -> list[np.ndarray]:
    """Takes the 32 steps in NumPy."""
    x, y = work.columns()
    if order is not None:
        x, y = x[order], y[order]
    if not work.is_vectors:
        x = (x[:, ::21, ::21] / 255.0).reshape(len(x), -1)
    weights = [weight.astype(np.float64) for weight in work.weights()]
    step = len(x) // MINIBATCHES
    for start in range(0, len(x), step):
        layers = [np.asarray(x[start : start + step], np.float64)]
        for weight in weights[:-1]:
            layers.append(np.tanh(layers[-1] @ weight))
        error = (layers[-1] @ weights[-1])[:, 0] - y[start : start + step]
        back = (2 * error / step)[:, None]
        for i in reversed(range(len(weights))):
            grad = layers[i].T @ back
            back = back @ weights[i].T * (1 - layers[i] ** 2)
            weights[i] = weights[i] - RATE * grad
    return weights

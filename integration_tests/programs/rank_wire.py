"""Fits whose ranks send gradients in a narrow dtype, and NumPy's weights of the same.

Losses are linear in the weights, and numbers whole multiples of powers of two: all that
rounds is what ranks send.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tw_core.testing import CPUS
from tw_keras import TowerModel

RANDOM = np.random.default_rng(0)
STEPS = (2, 1)  # of each rank: in the last only rank 0 has a batch
ROWS, WORDS = 8, 5
SHAPE = (len(STEPS), max(STEPS), ROWS)
# Times rows, gradients are infinite in float16; the mean over rows is not.
X = RANDOM.integers(-4096, 4096, size=(*SHAPE, 4)) * 8.0
IDS = RANDOM.integers(0, WORDS, size=SHAPE)
Y = RANDOM.integers(1, 64, size=(*SHAPE, 3)) / 64.0


def loss(y: Any, predicted: Any) -> Any:
    return tf.reduce_sum(y * predicted, axis=-1)


def make() -> keras.Model:
    rows, ids = keras.Input([4]), keras.Input([], dtype="int32")
    table = keras.layers.Embedding(WORDS, 3, embeddings_initializer="zeros")
    dense = keras.layers.Dense(3, kernel_initializer="zeros")
    return keras.Model([rows, ids], dense(rows) + table(ids))


def fits(group: Any, wire: str, towers: int) -> list[list[np.ndarray]]:
    """Returns the towers' weights: of the table, the kernel and the bias."""
    model = TowerModel(make, CPUS[:towers], group=group, wire_dtype=wire)
    model.compile(keras.optimizers.SGD(1.0), loss)
    own = [data[group.rank, : STEPS[group.rank]] for data in (X, IDS, Y)]
    x, ids, y = (rows.reshape(-1, *rows.shape[2:]) for rows in own)
    model.fit((x, ids), y, batch_size=ROWS, shuffle=False, verbose=0)
    return [weights_of(model) for model in model.towers]


def weights_of(model: Any) -> list[np.ndarray]:
    return [
        next(own for own in model.weights if own.path.endswith(name)).numpy()
        for name in ("embeddings", "kernel", "bias")
    ]


def by_numpy(wire: str) -> list[np.ndarray]:
    """Returns the weights by gradients that are rounded, added and rounded again."""
    half = tf.as_dtype(wire).as_numpy_dtype

    def rounded(array: np.ndarray) -> np.ndarray:
        return array.astype(half).astype(np.float32)

    table, kernel, bias = (np.zeros(shape) for shape in ([WORDS, 3], [4, 3], [3]))
    for step in range(max(STEPS)):
        ranks = [rank for rank, steps in enumerate(STEPS) if step < steps]
        shares = {rank: Y[rank, step] / (ROWS * len(ranks)) for rank in ranks}
        of_kernel = [rounded(X[rank, step].T @ shares[rank]) for rank in ranks]
        kernel -= rounded(sum(of_kernel))
        bias -= rounded(sum(rounded(shares[rank].sum(0)) for rank in ranks))
        for rank in ranks:  # Rows of tables are joined, not added.
            np.subtract.at(table, IDS[rank, step], rounded(shares[rank]))
    return [table, kernel, bias]

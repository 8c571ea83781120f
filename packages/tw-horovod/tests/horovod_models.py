"""A linear model trained in NumPy, as one process with the whole batch would."""

from collections.abc import Sequence

import numpy as np

RATE, MOMENTUM = 0.1, 0.5


def make_batch(size: int, rows_each: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and targets of all ranks, [size, rows, 2] and [size, rows]."""
    draw = np.random.default_rng(size)
    rows = draw.normal(size=(size, rows_each, 2)).astype(np.float32)
    noise = draw.normal(size=(size, rows_each)).astype(np.float32)
    return rows, rows @ np.float32([1.0, -2.0]) + noise


def gradient(weights: np.ndarray, rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the gradient of the mean squared error."""
    return 2 * rows.T @ (rows @ weights - targets) / len(rows)


def train(
    rows: np.ndarray,
    targets: np.ndarray,
    *,
    steps: int = 4,
    start: float = 0.0,
    factor: float = 1.0,
    batches: Sequence[int] | None = None,
) -> np.ndarray:
    """Returns the weights after each step, with momentum.

    Args:
      rows: of all ranks.
      targets: of all ranks.
      steps: number of updates.
      start: of each weight.
      factor: of the mean of all ranks' gradients.
      batches: how many steps each rank has data for; then it brings zeros.
    """
    weights = np.full([2], start)
    speed, values = np.zeros([2]), []
    for step in range(steps):
        grads = [
            gradient(weights, *own)
            if batches is None or step < batches[rank]
            else np.zeros([2])
            for rank, own in enumerate(zip(rows, targets, strict=True))
        ]
        speed = MOMENTUM * speed + factor * np.sum(grads, axis=0) / len(rows)
        weights = weights - RATE * speed
        values.append(weights)
    return np.array(values)

"""A regression on three features, for trainers of both modes."""

import numpy as np
import tensorflow as tf

LR = 0.125  # Exact in float32, as are sums of small whole numbers.
REGRESSION = {"x": (np.float32, [3]), "y": (np.float32, [])}
START = np.float32([0.5, -1, 2])


def descent(rate=LR):
    return lambda: tf.compat.v1.train.GradientDescentOptimizer(rate)


def regression_rows(num_rows):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((num_rows, 3)).astype(np.float32)
    return x, rng.standard_normal(num_rows).astype(np.float32)

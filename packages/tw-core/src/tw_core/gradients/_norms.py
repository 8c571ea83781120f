"""The global norm of gradients, and whether all are finite.

The sum of squares is the cheapest pass over the data, and finite only if every element
is. If it is not, all elements may still be finite and only a square too large; then
each element is tested.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.gradients._values import scale, values_of
from tw_core.gradients._weights import weight_dtype

# Factors that keep squares within a dtype.
_SHRINK = {tf.float32: 2.0**-64, tf.float64: 2.0**-512}


def finite_and_norm(grads: Sequence[Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns whether every element is finite, and, if so, the global norm.

    Rows of sparse gradients must be unique. The norm has the widest dtype.
    """
    squares = _sum_of_squares(grads, 1.0)
    finite, norm = tf.cond(
        tf.math.is_finite(squares),
        lambda: (tf.constant(True), tf.sqrt(squares)),
        lambda: _exact(grads),
    )
    return finite, norm


def is_finite(grad: Any) -> tf.Tensor:
    """Returns whether every element of a gradient, dense or sparse, is finite."""
    return tf.reduce_all(tf.math.is_finite(values_of(grad)))


def _exact(grads: Sequence[Any]) -> tuple[tf.Tensor, tf.Tensor]:
    finite = tf.reduce_all(tf.stack(list(map(is_finite, grads))))
    factor = _SHRINK[weight_dtype(map(values_of, grads))]
    return finite, tf.sqrt(_sum_of_squares(grads, factor)) / factor


def _sum_of_squares(grads: Sequence[Any], factor: float) -> tf.Tensor:
    values = list(map(values_of, grads))
    if factor != 1.0:
        values = [scale(value, factor) for value in values]
    wide = weight_dtype(values)
    halves = [tf.cast(tf.nn.l2_loss(value), wide) for value in values]
    return 2.0 * (halves[0] if len(halves) == 1 else tf.add_n(halves))

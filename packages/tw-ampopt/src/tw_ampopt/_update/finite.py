"""Are all gradients finite, how long are they, and whose are not.

The sum of squares is the cheapest pass over the data, and finite only when every
element is. When it is not, an element may still be finite and only its square too
large; then each element is looked at.
"""

from collections.abc import Sequence

import tensorflow as tf

from tw_ampopt._update.buffers import Buffer
from tw_core import sum_duplicate_rows

_SHRINK = 2.0**-64  # squares of what it multiplies stay within float32


def verdict(buffers: Sequence[Buffer]) -> tuple[tf.Tensor, tf.Tensor]:
    """Tells whether every element is finite, and the global norm.

    Args:
      buffers: any number of float32 tensors; rows of a sparse one that share an
        index are added before they are squared.

    Returns:
      bool scalar and float32 scalar, the norm being meaningless where not all
      is finite.
    """
    squares = _sum_of_squares(buffers, 1.0)
    finite, norm = tf.cond(
        tf.math.is_finite(squares),
        lambda: (tf.constant(True), tf.sqrt(squares)),
        lambda: _exact(buffers),
    )
    return finite, norm


def _exact(buffers: Sequence[Buffer]) -> tuple[tf.Tensor, tf.Tensor]:
    finite = tf.reduce_all(tf.stack([is_finite(buffer) for buffer in buffers]))
    return finite, tf.sqrt(_sum_of_squares(buffers, _SHRINK)) / _SHRINK


def _sum_of_squares(buffers: Sequence[Buffer], factor: float) -> tf.Tensor:
    values = [_values(buffer) for buffer in buffers]
    if factor != 1.0:
        values = [value * factor for value in values]
    halves = [tf.nn.l2_loss(value) for value in values]
    return 2.0 * (halves[0] if len(halves) == 1 else tf.add_n(halves))


def is_finite(buffer: Buffer) -> tf.Tensor:
    """Tells whether every element of one gradient is finite, as a bool scalar."""
    values = buffer.values if isinstance(buffer, tf.IndexedSlices) else buffer
    return tf.reduce_all(tf.math.is_finite(values))


def _values(buffer: Buffer) -> tf.Tensor:
    if not isinstance(buffer, tf.IndexedSlices):
        return buffer
    return sum_duplicate_rows(buffer).values

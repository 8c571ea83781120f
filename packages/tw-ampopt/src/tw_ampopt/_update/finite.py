"""Finiteness test and global norm of the gradients.

The sum of squares is the cheapest pass over the data, and finite only when every
element is. When it is not, an element may still be finite and only its square too
large; then each element is tested.
"""

from collections.abc import Sequence

import tensorflow as tf

from tw_core.gradients import Gradient, values_of, with_unique_rows

_SHRINK = 2.0**-64  # squares of what it multiplies stay within float32


def all_finite_and_norm(buffers: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    """Tests whether every element is finite, and computes the global norm.

    Args:
      buffers: any number of float32 tensors; rows of a sparse one that share an
        index are added before they are squared.

    Returns:
      bool scalar and float32 scalar, the norm being meaningless where not all
      elements are finite.
    """
    squares = _sum_of_squares(buffers, 1.0)
    finite, norm = tf.cond(
        tf.math.is_finite(squares),
        lambda: (tf.constant(True), tf.sqrt(squares)),
        lambda: _exact(buffers),
    )
    return finite, norm


def nonfinite_flags(
    grads: Sequence[Sequence[Sequence[Gradient]]], devices: Sequence[str]
) -> tf.Tensor:
    """Returns [K, N] bool: which gradients have an element that is not finite.

    Args:
      grads: [K][N][calls] gradients of one micro-batch.
      devices: [K] devices to test them on.
    """
    rows = []
    for device, tower in zip(devices, grads, strict=True):
        with tf.device(device or None):
            rows.append(tf.stack([_any_nonfinite(calls) for calls in tower]))
    return tf.stack(rows)


def _exact(buffers: Sequence[Gradient]) -> tuple[tf.Tensor, tf.Tensor]:
    finite = tf.reduce_all(tf.stack([_is_finite(buffer) for buffer in buffers]))
    return finite, tf.sqrt(_sum_of_squares(buffers, _SHRINK)) / _SHRINK


def _sum_of_squares(buffers: Sequence[Gradient], factor: float) -> tf.Tensor:
    values = [values_of(with_unique_rows(buffer)) for buffer in buffers]
    if factor != 1.0:
        values = [value * factor for value in values]
    halves = [tf.nn.l2_loss(value) for value in values]
    return 2.0 * (halves[0] if len(halves) == 1 else tf.add_n(halves))


def _is_finite(grad: Gradient) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(values_of(grad)))


def _any_nonfinite(calls: Sequence[Gradient]) -> tf.Tensor:
    finite = [_is_finite(grad) for grad in calls if grad is not None]
    return tf.logical_not(tf.reduce_all(tf.stack([tf.constant(True), *finite])))

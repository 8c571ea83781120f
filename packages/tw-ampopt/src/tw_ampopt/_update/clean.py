"""Raw gradients made uniform: averaged over calls, none missing, float32.

The original divided by the number of calls even where a call's loss did not reach
the variable; here a call that does not reach a variable does not count for it.
"""

from collections.abc import Sequence

import tensorflow as tf

from tw_ampopt._update.buffers import Buffer, scaled


def clean_gradient(calls: Sequence[Buffer | None], shape: Sequence[int]) -> Buffer:
    """Averages one variable's gradients over the calls that reach it.

    Args:
      calls: a gradient a call, of any floating dtype; None where the loss of a
        call does not reach the variable.
      shape: the variable's.

    Returns:
      float32; sparse where every call's gradient is; zeros where all are None.
    """
    reached = [to_float32(grad) for grad in calls if grad is not None]
    if not reached:
        return tf.zeros(shape, tf.float32)
    total = _sum(reached)
    if len(reached) > 1:
        total = scaled(total, tf.constant(1.0 / len(reached), tf.float32))
    return total


def to_float32(grad: Buffer) -> Buffer:
    """Casts a gradient, sparse or not."""
    if not isinstance(grad, tf.IndexedSlices):
        return tf.cast(grad, tf.float32)
    return tf.IndexedSlices(
        tf.cast(grad.values, tf.float32), grad.indices, grad.dense_shape
    )


def _sum(grads: Sequence[Buffer]) -> Buffer:
    if len(grads) == 1:
        return grads[0]
    if all(isinstance(grad, tf.IndexedSlices) for grad in grads):
        indices = [tf.cast(grad.indices, tf.int64) for grad in grads]
        return tf.IndexedSlices(
            tf.concat([grad.values for grad in grads], axis=0),
            tf.concat(indices, axis=0),
            grads[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(grad) for grad in grads])

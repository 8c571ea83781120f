"""Joining tensors into one flat tensor, and cutting it up again."""

from collections.abc import Sequence

import tensorflow as tf

from tw_reduce._widening import narrow_source


def join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins dense tensors of one dtype, in their order, into one of rank 1.

    If all were widened from one dtype, they are joined first and widened then.
    """
    narrow = [narrow_source(tensor) for tensor in tensors]
    if len({tensor.dtype for tensor in narrow}) > 1:
        narrow = list(tensors)
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in narrow], axis=0)
    return tf.cast(flat, tensors[0].dtype)


def cut(flat: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Cuts a flat tensor at the tensors' boundaries.

    Args:
      flat: [sum of elements].
      shapes: fully known, in the order in which the tensors were joined.

    Returns:
      One tensor per shape.
    """
    sizes = [shape.num_elements() for shape in shapes]
    parts = tf.split(flat, sizes)
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

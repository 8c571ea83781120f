"""What travels between devices: narrow where it was widened, small tensors joined.

A cast to a wider floating dtype is exact, so it may as well be made where the
tensor is used; then half the bytes cross between the devices. The first cast
is left without a user, and TensorFlow prunes it.
"""

from collections.abc import Sequence

import tensorflow as tf


def narrow_source(tensor: tf.Tensor) -> tf.Tensor:
    """Returns what a tensor was exactly widened from; else the tensor itself.

    Args:
      tensor: dense; any dtype.

    Returns:
      The input of the floating cast that made ``tensor``, if that cast widened
      it in the graph that is being built.
    """
    if tf.executing_eagerly() or tensor.graph is not tf.compat.v1.get_default_graph():
        return tensor
    if tensor.op.type != "Cast":
        return tensor
    source = tensor.op.inputs[0]
    widened = source.dtype.is_floating and source.dtype.size < tensor.dtype.size
    return source if widened and tensor.dtype.is_floating else tensor


def arrived(tensor: tf.Tensor) -> tf.Tensor:
    """Repeats an exact widening cast here; else returns the tensor itself."""
    return tf.cast(narrow_source(tensor), tensor.dtype)


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

"""Letting a tensor travel narrow: its widening cast is repeated on arrival.

A cast to a wider floating dtype is exact, so it may as well be made where the
tensor is used; then half the bytes cross between the devices. The first cast
is left without a user and TensorFlow prunes it.
"""

import tensorflow as tf


def narrow_source(tensor: tf.Tensor) -> tf.Tensor:
    """Finds what a tensor was exactly widened from; else itself.

    Args:
      tensor: dense; any dtype.

    Returns:
      The input of the floating cast that made ``tensor``, if that cast widened
      it in the graph being built now.
    """
    if tf.executing_eagerly() or tensor.graph is not tf.compat.v1.get_default_graph():
        return tensor
    if tensor.op.type != "Cast":
        return tensor
    source = tensor.op.inputs[0]
    widened = source.dtype.is_floating and source.dtype.size < tensor.dtype.size
    return source if widened and tensor.dtype.is_floating else tensor


def arrived(tensor: tf.Tensor) -> tf.Tensor:
    """Repeats an exact widening cast here; else gives the tensor itself."""
    return tf.cast(narrow_source(tensor), tensor.dtype)

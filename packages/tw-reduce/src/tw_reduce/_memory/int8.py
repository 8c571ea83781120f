"""Eight bits per element, and a scale per tensor.

Source: linear quantization as in Dettmers, "8-Bit Approximations for Parallelism in
Deep Learning", ICLR 2016.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_reduce._checks import named_compressor
from tw_reduce._memory.protocol import Compressor
from tw_reduce._memory.rows import as_float32, from_rows, to_row


def int8() -> Compressor:
    """Makes a compressor to whole numbers from -127 to 127 times a scale.

    The scale is the largest magnitude / 127. Elements are rounded to the nearest
    number, halves to the even one. Every tower sends every other a quarter of float32's
    bytes: with more than eight towers, a sum in float32 sends less.

    Returns:
      A compressor for ``error_feedback``.
    """
    return named_compressor(_compress, "int8()")


def _compress(
    tensor: tf.Tensor,
) -> tuple[Sequence[tf.IndexedSlices], Callable[..., tf.Tensor]]:
    dtype = tensor.dtype
    scale = as_float32(tf.reduce_max(tf.abs(tensor)) / 127)
    steps = tf.math.divide_no_nan(tensor, tf.cast(scale, dtype))
    if dtype == tf.float64:  # A scale that float32 cannot hold is smaller.
        steps = tf.clip_by_value(steps, -127, 127)
    numbers = tf.cast(tf.round(steps), tf.int8)
    specs = [tf.TensorSpec([], tf.float32), tf.TensorSpec(tensor.shape, tf.int8)]

    def decode(rows: tf.IndexedSlices) -> tf.Tensor:
        scales, towers = from_rows(rows, specs)
        flat = tf.reshape(towers, [-1, tensor.shape.num_elements()])
        total = tf.linalg.matvec(
            tf.cast(flat, dtype), tf.cast(scales, dtype), transpose_a=True
        )
        return tf.reshape(total, tensor.shape)

    return [to_row([scale, numbers])], decode

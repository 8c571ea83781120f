"""Eight bits per element, and a scale per tensor, or per part of one.

Source: linear quantization as in Dettmers, "8-Bit Approximations for Parallelism in
Deep Learning", ICLR 2016.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_reduce._memory.protocol import Compressor
from tw_reduce._memory.rows import RowCompressor, as_float32


def int8() -> Compressor:
    """Makes a compressor to whole numbers from -127 to 127 times a scale.

    The scale is the largest magnitude / 127. Elements are rounded to the nearest
    number, halves to the even one. Every tower sends every other a quarter of float32's
    bytes: with more than eight towers, a sum in float32 sends less. Ranks that exchange
    parts send a quarter of what they do in float32, however many they are.

    Returns:
      A compressor for ``error_feedback``.
    """
    return RowCompressor("int8()", _compress)


def _compress(
    matrix: tf.Tensor,
) -> tuple[Sequence[tf.Tensor], Callable[..., tf.Tensor]]:
    dtype = matrix.dtype
    scales = as_float32(tf.reduce_max(tf.abs(matrix), 1) / 127)
    steps = tf.math.divide_no_nan(matrix, tf.cast(scales, dtype)[:, tf.newaxis])
    if dtype == tf.float64:  # A scale that float32 cannot hold is smaller.
        steps = tf.clip_by_value(steps, -127, 127)
    numbers = tf.cast(tf.round(steps), tf.int8)

    def read(scales: tf.Tensor, numbers: tf.Tensor, *, apart: bool) -> tf.Tensor:
        values, factors = tf.cast(numbers, dtype), tf.cast(scales, dtype)
        if apart:
            return values * factors[:, tf.newaxis]
        return tf.linalg.matvec(values, factors, transpose_a=True)

    return [scales, numbers], read

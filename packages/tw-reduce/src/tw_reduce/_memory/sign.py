"""A bit per element, and a scale per tensor, or per part of one.

Source: the scaled sign of Karimireddy et al., "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_reduce._memory.protocol import Compressor
from tw_reduce._memory.rows import RowCompressor, as_float32

_BITS = tuple(1 << bit for bit in range(8))
_SIGNS = [[1.0 if octet & bit else -1.0 for bit in _BITS] for octet in range(256)]


def sign() -> Compressor:
    """Makes a compressor to the sign of each element times the mean magnitude.

    Zero counts as positive. Every tower sends every other 1/32 of float32's bytes.
    Ranks that exchange parts send 1/32 of what they do in float32, however many they
    are.

    Returns:
      A compressor for ``error_feedback``, without which it does not converge.
    """
    return RowCompressor("sign()", _compress)


def _compress(
    matrix: tf.Tensor,
) -> tuple[Sequence[tf.Tensor], Callable[..., tf.Tensor]]:
    dtype, (rows, count) = matrix.dtype, matrix.shape
    # Divided first, by a power of two, lest the sum overflow; the bits are the same.
    shrink = 2.0 ** -(count.bit_length())
    scales = as_float32(tf.reduce_mean(tf.abs(matrix) * shrink, 1) / shrink)
    positive = tf.cast(matrix >= 0, tf.float32)
    padded = tf.pad(positive, [[0, 0], [0, -count % 8]])
    bits = tf.reshape(padded, [-1, 8])
    # A matrix product; shifts and sums of rows of eight take four times as long.
    octets = tf.cast(tf.linalg.matvec(bits, tf.constant(_BITS, tf.float32)), tf.uint8)
    octets = tf.reshape(octets, [rows, padded.shape[1] // 8])

    def read(scales: tf.Tensor, octets: tf.Tensor, *, apart: bool) -> tf.Tensor:
        signs = tf.gather(tf.constant(_SIGNS, dtype), tf.cast(octets, tf.int32))
        values = tf.reshape(signs, [-1, octets.shape[1] * 8])
        factors = tf.cast(scales, dtype)
        if apart:
            return values[:, :count] * factors[:, tf.newaxis]
        return tf.linalg.matvec(values, factors, transpose_a=True)[:count]

    return [scales, octets], read

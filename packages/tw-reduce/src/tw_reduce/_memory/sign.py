"""A bit per element, and a scale per tensor.

Source: the scaled sign of Karimireddy et al., "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_reduce._checks import named_compressor
from tw_reduce._memory.protocol import Compressor
from tw_reduce._memory.rows import as_float32, from_rows, to_row

_BITS = tuple(1 << bit for bit in range(8))
_SIGNS = [[1.0 if octet & bit else -1.0 for bit in _BITS] for octet in range(256)]


def sign() -> Compressor:
    """Makes a compressor to the sign of each element times the mean magnitude.

    Zero counts as positive. Every tower sends every other 1/32 of float32's bytes.

    Returns:
      A compressor for ``error_feedback``, without which it does not converge.
    """
    return named_compressor(_compress, "sign()")


def _compress(
    tensor: tf.Tensor,
) -> tuple[Sequence[tf.IndexedSlices], Callable[..., tf.Tensor]]:
    dtype, count = tensor.dtype, tensor.shape.num_elements()
    # Divided first, by a power of two, lest the sum overflow; the bits are the same.
    shrink = 2.0 ** -(count.bit_length())
    scale = as_float32(tf.reduce_mean(tf.abs(tensor) * shrink) / shrink)
    positive = tf.cast(tf.reshape(tensor, [-1]) >= 0, tf.float32)
    bits = tf.reshape(tf.pad(positive, [[0, -count % 8]]), [-1, 8])
    # A matrix product; shifts and sums of rows of eight take four times as long.
    octets = tf.cast(tf.linalg.matvec(bits, tf.constant(_BITS, tf.float32)), tf.uint8)
    specs = [tf.TensorSpec([], tf.float32), tf.TensorSpec(octets.shape, tf.uint8)]

    def decode(rows: tf.IndexedSlices) -> tf.Tensor:
        scales, towers = from_rows(rows, specs)
        signs = tf.gather(tf.constant(_SIGNS, dtype), tf.cast(towers, tf.int32))
        flat = tf.reshape(signs, [-1, octets.shape[0] * 8])
        total = tf.linalg.matvec(flat, tf.cast(scales, dtype), transpose_a=True)
        return tf.reshape(total[:count], tensor.shape)

    return [to_row([scale, octets])], decode

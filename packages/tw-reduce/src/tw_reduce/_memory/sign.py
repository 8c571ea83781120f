"""A bit per element, and a scale per tensor.

Source: the scaled sign of Karimireddy et al., "Error Feedback Fixes SignSGD and other
Gradient Compression Schemes", ICML 2019.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_reduce._memory.protocol import Compressor
from tw_reduce._memory.rows import from_rows, to_row

_BITS = tuple(1 << bit for bit in range(8))


def sign() -> Compressor:
    """Makes a compressor to the sign of each element times the mean magnitude.

    Zero counts as positive. A thirty-second of float32 travels, from every tower to
    every other.

    Returns:
      A compressor for ``error_feedback``, without which it does not converge.
    """
    return _compress


def _compress(
    tensor: tf.Tensor,
) -> tuple[Sequence[tf.IndexedSlices], Callable[..., tf.Tensor]]:
    dtype, count = tensor.dtype, tensor.shape.num_elements()
    scale = tf.cast(tf.reduce_mean(tf.abs(tensor)), tf.float32)
    flat = tf.reshape(tensor, [-1]) >= 0
    flat = tf.pad(flat, [[0, -count % 8]])
    bits = tf.where(tf.reshape(flat, [-1, 8]), tf.constant(_BITS, tf.int32), 0)
    octets = tf.cast(tf.reduce_sum(bits, 1), tf.uint8)
    specs = [tf.TensorSpec([], tf.float32), tf.TensorSpec(octets.shape, tf.uint8)]

    def decode(rows: tf.IndexedSlices) -> tf.Tensor:
        scales, towers = from_rows(rows, specs)
        masks = tf.constant(_BITS, tf.uint8)
        are_set = tf.bitwise.bitwise_and(towers[..., tf.newaxis], masks) > 0
        signs = tf.reshape(are_set, [-1, octets.shape[0] * 8])[:, :count]
        own = tf.cast(scales, dtype)[:, tf.newaxis]
        total = tf.reduce_sum(tf.where(signs, own, -own), 0)
        return tf.reshape(total, tensor.shape)

    return [to_row([scale, octets])], decode

"""The largest elements, and where they are.

Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent",
EMNLP 2017; the sampled threshold of Lin, Han, Mao, Wang and Dally, "Deep Gradient
Compression", ICLR 2018.
"""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_core.internal import check_flag, check_number, check_whole_number
from tw_reduce._memory.protocol import Compressor
from tw_reduce._memory.rows import from_rows, to_row

_STRIDE = 61  # from one element of a sample to the next; prime, to meet all columns
_FEWEST = 8  # elements of a sample that are to reach the threshold


def top_k(
    share: float = 0.01, *, count: int | None = None, sampled: bool = False
) -> Compressor:
    """Makes a compressor to a tensor's elements of largest magnitude.

    Each travels with its place, in 8 bytes, from every tower to every other.

    Args:
      share: of each tensor's elements, above 0 and up to 1; at least one.
      count: their number in each tensor, in place of ``share``.
      sampled: whether the smallest magnitude that is sent is estimated from evenly
        spaced elements, which takes a fraction of the time: about as many are sent,
        and never more. XLA does not compile it.

    Returns:
      A compressor for ``error_feedback``.

    Raises:
      TypeError: an argument of another type.
      ValueError: an argument out of its range.
    """
    check_number(share=share, above=0)
    if share > 1:
        raise ValueError(f"share must be at most 1; got {share}.")
    if count is not None:
        check_whole_number(count=count, at_least=1)
    check_flag(sampled=sampled)

    def compress(
        tensor: tf.Tensor,
    ) -> tuple[Sequence[tf.IndexedSlices], Callable[..., tf.Tensor]]:
        size = tensor.shape.num_elements()
        k = min(size, count or math.ceil(share * size))
        flat = tf.reshape(tensor, [-1])
        if sampled and k >= _FEWEST * _STRIDE:
            places, values = _above_threshold(flat, k)
        else:
            places = tf.math.top_k(tf.abs(flat), k, sorted=False).indices
            values = tf.gather(flat, places)
        specs = [tf.TensorSpec([k], tf.float32), tf.TensorSpec([k], tf.int32)]

        def decode(rows: tf.IndexedSlices) -> tf.Tensor:
            values, places = (tf.reshape(o, [-1]) for o in from_rows(rows, specs))
            own = tf.cast(values, tensor.dtype)
            total = tf.math.unsorted_segment_sum(own, places, size)
            return tf.reshape(total, tensor.shape)

        return [to_row([tf.cast(values, tf.float32), places])], decode

    return compress


def _above_threshold(flat: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns k places, and values there; zeros where fewer reach the threshold."""
    magnitudes = tf.abs(flat)
    sample = magnitudes[::_STRIDE]
    wanted = k * sample.shape[0] // magnitudes.shape[0]
    threshold = tf.reduce_min(tf.math.top_k(sample, wanted, sorted=False).values)
    found = tf.cast(tf.where(magnitudes >= threshold)[:k, 0], tf.int32)
    missing = [[0, k - tf.shape(found)[0]]]
    padded = tf.pad(found, missing), tf.pad(tf.gather(flat, found), missing)
    places, values = (tf.ensure_shape(own, [k]) for own in padded)
    return places, values

"""The largest elements, and their positions.

Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent",
EMNLP 2017; the sampled threshold of Lin, Han, Mao, Wang and Dally, "Deep Gradient
Compression", ICLR 2018.
"""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_core.internal import (
    check_flag,
    check_number,
    check_whole_number,
    compiles_with_xla,
)
from tw_reduce._memory.protocol import Compressor
from tw_reduce._memory.rows import from_rows, to_row

_STRIDE = 61  # from one element of a sample to the next; prime, to reach all columns
_FEWEST = 8  # elements of a sample that should reach the threshold


def top_k(
    share: float = 0.01, *, count: int | None = None, sampled: bool = False
) -> Compressor:
    """Makes a compressor to a tensor's elements of largest magnitude.

    Every tower sends each of them to every other, with its position, in 8 bytes.

    Args:
      share: of each tensor's elements, above 0 and up to 1; at least one element.
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
            places = _largest(tf.abs(flat), k)
            values = tf.gather(flat, places)
        specs = [tf.TensorSpec([k], tf.float32), tf.TensorSpec([k], tf.int32)]

        def decode(rows: tf.IndexedSlices) -> tf.Tensor:
            values, places = (tf.reshape(o, [-1]) for o in from_rows(rows, specs))
            own = tf.cast(values, tensor.dtype)
            total = tf.math.unsorted_segment_sum(own, places, size)
            return tf.reshape(total, tensor.shape)

        return [to_row([tf.cast(values, tf.float32), places])], decode

    return compress


def _largest(magnitudes: tf.Tensor, k: int) -> tf.Tensor:
    """Returns the places of the k largest, as ``tf.math.top_k`` does, but sorts few.

    A threshold for four standard deviations more than k mostly leaves enough.
    """
    size = magnitudes.shape[0]
    count = k + math.isqrt(16 * _STRIDE * k)

    def of_all() -> tf.Tensor:
        return tf.math.top_k(magnitudes, k, sorted=False).indices

    if k < _FEWEST * _STRIDE or 2 * count > size or compiles_with_xla():
        return of_all()
    found = tf.where(magnitudes >= _find_threshold(magnitudes, count))[:, 0]

    def of_found() -> tf.Tensor:  # Of equal ones the first, as in ``of_all``.
        largest = tf.math.top_k(tf.gather(magnitudes, found), k, sorted=False)
        return tf.cast(tf.gather(found, largest.indices), tf.int32)

    return tf.cond(tf.size(found) >= k, of_found, of_all)


def _find_threshold(magnitudes: tf.Tensor, count: int) -> tf.Tensor:
    """Estimates the threshold that ``count`` magnitudes reach, from a sample."""
    sample = magnitudes[::_STRIDE]
    wanted = count * sample.shape[0] // magnitudes.shape[0]
    return tf.reduce_min(tf.math.top_k(sample, wanted, sorted=False).values)


def _above_threshold(flat: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns k places, and values there; zeros where fewer reach the threshold."""
    magnitudes = tf.abs(flat)
    threshold = _find_threshold(magnitudes, k)
    found = tf.cast(tf.where(magnitudes >= threshold)[:k, 0], tf.int32)
    missing = [[0, k - tf.shape(found)[0]]]
    padded = tf.pad(found, missing), tf.pad(tf.gather(flat, found), missing)
    places, values = (tf.ensure_shape(own, [k]) for own in padded)
    return places, values

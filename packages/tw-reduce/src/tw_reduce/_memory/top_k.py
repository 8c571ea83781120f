"""The largest elements, and their positions.

Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent",
EMNLP 2017; the sampled threshold of Lin, Han, Mao, Wang and Dally, "Deep Gradient
Compression", ICLR 2018.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tw_core.internal import (
    check_flag,
    check_number,
    check_whole_number,
    compiles_with_xla,
)
from tw_reduce._memory.error_feedback import state_dtype
from tw_reduce._memory.protocol import Compressor
from tw_reduce._memory.rows import RowCompressor, as_float32

_BLOCK = 61  # elements, of which a sample has one
_FEWEST = 8  # elements of a sample that should reach the threshold
_TINY = float(np.finfo("float32").tiny)


def top_k(
    share: float = 0.01, *, count: int | None = None, sampled: bool = False
) -> Compressor:
    """Makes a compressor to a tensor's elements of largest magnitude.

    Every tower sends each of them to every other, with its position, in 8 bytes. Ranks
    that exchange parts send the largest of each part to its owner, and all get the
    largest of its sum: the rest of the sum waits.

    Args:
      share: of each tensor's elements, above 0 and up to 1; at least one element.
      count: their number in each tensor, in place of ``share``; not of parts, which
        ranks do not exchange then.
      sampled: whether a few of them may wait for a later step, which takes less time:
        the largest that reach an estimated threshold are sent, at least half as many
        as wanted. XLA leaves none out.

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
        matrix: tf.Tensor,
    ) -> tuple[Sequence[tf.Tensor], Callable[..., tf.Tensor]]:
        size = matrix.shape[1]
        k = min(size, count or math.ceil(share * size))
        wide = tf.cast(matrix, state_dtype(matrix.dtype))
        found = [_largest(flat, k, sampled) for flat in tf.unstack(wide)]
        places, values = map(tf.stack, zip(*found, strict=True))

        def read(values: tf.Tensor, places: tf.Tensor, *, apart: bool) -> tf.Tensor:
            own, total = tf.cast(values, matrix.dtype), size
            if apart:
                of_rows = values.shape[0]
                places += size * tf.range(of_rows)[:, tf.newaxis]
                total = of_rows * size
            summed = tf.math.unsorted_segment_sum(own, places, total)
            return tf.reshape(summed, [-1, size]) if apart else summed

        return [as_float32(values), places], read

    return RowCompressor("top_k()", compress, cuts=count is None)


def _largest(flat: tf.Tensor, k: int, sampled: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the places of the k largest magnitudes and the values; sorts few.

    If fewer are found, and none is larger, the others are zeros at place 0.
    """
    magnitudes, size = tf.abs(flat), flat.shape[0]
    # A threshold for four standard deviations more than k mostly leaves enough.
    count = k if sampled else k + math.isqrt(16 * _BLOCK * k)
    is_small = k < _FEWEST * _BLOCK or (2 * count > size and not sampled)
    if is_small or compiles_with_xla():
        places = tf.math.top_k(magnitudes, k, sorted=False).indices
        return places, tf.gather(flat, places)
    threshold = _find_threshold(magnitudes, count)
    # Zeros are never sorted: of an embedding's gradient most elements may be zero.
    found = tf.where(magnitudes >= tf.maximum(threshold, _TINY))[:, 0]
    is_enough = tf.logical_or(
        tf.size(found) >= (k // 2 if sampled else k), threshold < _TINY
    )
    every = tf.range(size, dtype=tf.int64)
    found = tf.cond(is_enough, lambda: found, lambda: every)
    values = tf.gather(flat, found)

    def cut() -> tuple[tf.Tensor, tf.Tensor]:  # of equal ones the first, as above
        kept = tf.math.top_k(tf.abs(values), k, sorted=False).indices
        return tf.gather(found, kept), tf.gather(values, kept)

    def pad() -> tuple[tf.Tensor, tf.Tensor]:
        missing = [[0, k - tf.size(found)]]
        padded = tf.pad(found, missing), tf.pad(values, missing)
        return tuple(tf.ensure_shape(own, [k]) for own in padded)

    places, values = tf.cond(tf.size(found) > k, cut, pad)
    return tf.cast(places, tf.int32), values


def _find_threshold(magnitudes: tf.Tensor, count: int) -> tf.Tensor:
    """Estimates the threshold that ``count`` magnitudes reach, from a sample.

    It has a random element of each block. Evenly spaced ones can all lie in columns
    that are zero.
    """
    size = magnitudes.shape[0] // _BLOCK
    within = tf.random.stateless_uniform([size], [0, 0], 0, _BLOCK, tf.int32)
    sample = tf.gather(magnitudes, tf.range(0, size * _BLOCK, _BLOCK) + within)
    wanted = count * size // magnitudes.shape[0]
    return tf.reduce_min(tf.math.top_k(sample, wanted, sorted=False).values)

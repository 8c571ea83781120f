"""All towers' buffers reduced to their mean, once an update.

A reducer returns sums. They are divided once, by the towers times whatever else the
sums hold (micro-batches, or the scale), so that nothing is rounded twice.
"""

from collections.abc import Sequence
from functools import partial

import tensorflow as tf

import tw_reduce
from tw_ampopt._buffers import Buffer, divided
from tw_ampopt._update_options import Reducer


def tower_means(
    sums: Sequence[Sequence[Buffer]],
    factor: tf.Tensor | None,
    devices: Sequence[str],
    reducer: Reducer | None,
) -> list[list[Buffer]]:
    """Reduces and divides.

    Args:
      sums: [K][M] buffers.
      factor: what the mean is to be divided by besides the towers; a float32
        scalar, or None for 1.
      devices: [K] devices.
      reducer: by default ``tw_reduce.sum_balanced`` over the devices.

    Returns:
      [K][M], the same for every tower.
    """
    divisor = _product(len(sums), factor)
    if len(sums) > 1:
        reducer = reducer or partial(tw_reduce.sum_balanced, devices=tuple(devices))
        sums = reducer(sums)
    means = []
    for device, tower in zip(devices, sums, strict=True):
        with tf.device(device or None):
            means.append([divided(buffer, divisor) for buffer in tower])
    return means


def _product(count: int, factor: tf.Tensor | None) -> tf.Tensor | None:
    if factor is None:
        return None if count == 1 else tf.constant(float(count), tf.float32)
    return factor if count == 1 else factor * float(count)

"""All towers' buffers reduced to their mean, once an update.

A reducer returns sums. They are divided once, by the towers times whatever else the
sums hold (micro-batches, or the scale), so that nothing is rounded twice.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

import tw_reduce
from tw_ampopt._update.buffers import Buffer, divided
from tw_ampopt._update.options import Reducer


def tower_means(
    sums: Sequence[Sequence[Buffer]],
    factor: tf.Tensor | None,
    devices: Sequence[str],
    reducer: Reducer | None,
    *,
    caller: str,
) -> list[list[Buffer]]:
    """Reduces and divides.

    Args:
      sums: [K][M] buffers.
      factor: what the mean is to be divided by besides the towers; a float32
        scalar, or None for 1.
      devices: [K] devices.
      reducer: by default ``tw_reduce.sum_balanced`` over the devices.
      caller: opens messages.

    Returns:
      [K][M], the same for every tower.

    Raises:
      ValueError: a reducer that returns something else than [K][M] sums.
    """
    divisor = _product(len(sums), factor)
    if len(sums) > 1:
        reducer = reducer or partial(tw_reduce.sum_balanced, devices=tuple(devices))
        reduced = reducer(sums)
        _check_sums(reduced, sums, caller)
        sums = reduced
    means = []
    for device, tower in zip(devices, sums, strict=True):
        with tf.device(device or None):
            means.append([divided(buffer, divisor) for buffer in tower])
    return means


def _check_sums(reduced: Any, given: Sequence[Sequence[Buffer]], caller: str) -> None:
    wanted = [[str(buffer.shape) for buffer in tower] for tower in given]
    if not _is_like(reduced, given):
        raise ValueError(
            f"{caller}: reducer must return [K][M] sums, for each tower one for each "
            f"tensor that it was given, here of shapes {wanted}; got {reduced!r}."
        )


def _is_like(reduced: Any, given: Sequence[Sequence[Buffer]]) -> bool:
    lists = (list, tuple)
    if not isinstance(reduced, lists) or len(reduced) != len(given):
        return False
    return all(
        isinstance(tower, lists)
        and len(tower) == len(own)
        and all(map(_may_be_sum_of, tower, own))
        for tower, own in zip(reduced, given, strict=True)
    )


def _may_be_sum_of(total: Any, buffer: Buffer) -> bool:
    is_sum = isinstance(total, tf.Tensor | tf.IndexedSlices)
    return is_sum and bool(buffer.shape.is_compatible_with(total.shape))


def _product(count: int, factor: tf.Tensor | None) -> tf.Tensor | None:
    if factor is None:
        return None if count == 1 else tf.constant(float(count), tf.float32)
    return factor if count == 1 else factor * float(count)

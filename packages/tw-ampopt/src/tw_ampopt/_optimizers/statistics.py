"""What an optimizer tells of itself, as a dictionary of scalar tensors."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import check_flags
from tw_ampopt._optimizers.settings import Settings
from tw_ampopt._update.buffers import Buffer
from tw_ampopt._update.finite import is_finite
from tw_ampopt._update.state import SharedState
from tw_ampopt._update.update import Updater
from tw_ampopt._variables import name_of
from tw_ampopt._wrapped.learning_rate import LearningRate


def statistics(
    shared: SharedState, updater: Updater, settings: Settings
) -> dict[str, tf.Tensor]:
    """Reads the state.

    Returns:
      ``learning_rate`` of the next update; ``loss_scaling_log2`` where there is a
      scale; ``overflow_frequency``, the share of finished groups (updates, without
      accumulation) that were skipped; ``updates`` and ``skipped_updates``;
      ``global_norm`` of the last update's mean gradient before clipping; and
      ``micro_batches_dropped`` where they can be. All are scalars, float32 or
      int64.
    """
    scalars = shared.scalars
    rate = LearningRate(settings.learning_rate, scalars.updates, caller=settings.caller)
    with tf.device(scalars.host or None):
        updates = scalars.updates.read_value()
        skipped = scalars.skipped.read_value()
        finished = tf.maximum(updates + skipped, 1)
        values = {
            "learning_rate": rate.tensor(),
            "overflow_frequency": tf.cast(skipped, tf.float32)
            / tf.cast(finished, tf.float32),
            "updates": updates,
            "skipped_updates": skipped,
            "global_norm": updater.global_norm.read_value(),
        }
        if (log2 := scalars.scale.log2) is not None:
            values["loss_scaling_log2"] = tf.cast(log2.read_value(), tf.float32)
        if updater.group is not None and updater.group.dropped is not None:
            values["micro_batches_dropped"] = updater.group.dropped.read_value()
        return values


def nonfinite(
    towers: Sequence[Sequence[Sequence[Buffer | None]]], devices: Sequence[str]
) -> tf.Tensor:
    """Tells which gradients are not finite.

    Args:
      towers: [K][N][calls] gradients of one micro-batch.
      devices: [K] devices to look at them.

    Returns:
      [K, N] bool.
    """
    rows = []
    for device, tower in zip(devices, towers, strict=True):
        with tf.device(device or None):
            rows.append(tf.stack([_any_nonfinite(calls) for calls in tower]))
    return tf.stack(rows)


def names_where(
    flags: Any, variables: Sequence[Sequence[Any]], *, caller: str
) -> list[list[str]]:
    """Turns [K, N] flags (an array) into variables' names a tower.

    Raises:
      ValueError: another shape, or no flags.
    """
    rows = check_flags(flags, variables, caller=caller)
    lists = list(variables) * (len(rows) if len(variables) == 1 else 1)
    return [
        [name_of(v) for flag, v in zip(row, tower, strict=True) if flag]
        for row, tower in zip(rows, lists, strict=True)
    ]


def _any_nonfinite(calls: Sequence[Buffer | None]) -> tf.Tensor:
    finite = [is_finite(grad) for grad in calls if grad is not None]
    return tf.logical_not(tf.reduce_all(tf.stack([tf.constant(True), *finite])))

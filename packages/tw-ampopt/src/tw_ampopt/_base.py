"""The base of both optimizers: settings, shared state, and the methods that read it."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tw_ampopt._checks.arguments import check_slot, name_of
from tw_ampopt._settings import Settings
from tw_ampopt._update.state import SharedState
from tw_ampopt._update.update import Updater
from tw_ampopt._wrapped.factory import next_rate
from tw_core import copy_to_replicas
from tw_core.internal import without_autograph


class BaseOptimizer:
    """The common part of ``Optimizer`` and ``TowerOptimizer``."""

    elementwise = True  # if the wrapped optimizer is
    _settings: Settings
    _shared: SharedState
    report_mem_usage: bool

    def _set_up(self, settings: Settings, share: object, own: type) -> None:
        """Keeps the settings and makes the shared state, or takes that of ``share``."""
        if share is None:
            shared = SharedState(settings.rule, settings.make_wrapped)
        elif not (isinstance(share, BaseOptimizer) and isinstance(share, own)):
            raise TypeError(f"share must be a tw_ampopt.{own.__name__}; got {share!r}.")
        else:
            settings.check_share(share._settings)
            shared = share._shared
        self._settings, self._shared = settings, shared

    # Methods that depend on the mode.

    @property
    def devices(self) -> list[str]:
        """The towers' devices."""
        raise NotImplementedError

    def _scope(self) -> AbstractContextManager[None]:
        """Returns the scope in which ops are built."""
        raise NotImplementedError

    def _built(self) -> Updater:
        """Returns the updater of the last step, for a method that reads its state."""
        raise NotImplementedError

    def _started(self, value: Any) -> SharedState:
        """Checks a value to be scaled; returns the shared state, with its scale."""
        raise NotImplementedError

    @without_autograph
    def apply_loss_scaling(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a tensor by the scale; returns it unchanged without scaling."""
        return self._started(value).scaled(value)

    @without_autograph
    def undo_loss_scaling(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a tensor by 1 / scale; returns it unchanged without scaling."""
        return self._started(value).unscaled(value)

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns the slot ``name`` of ``var`` in the wrapped optimizer, or None."""
        check_slot(var, name)
        slots = (own.get_slot(var, name) for own in self._shared.wrapped.values())
        return next((slot for slot in slots if slot is not None), None)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the wrapped optimizer's slots; none before it is made."""
        first = next(iter(self._shared.wrapped.values()), None)
        return [] if first is None else first.get_slot_names()

    @without_autograph
    def statistics(self) -> dict[str, tf.Tensor]:
        """Returns the optimizer's state as scalar tensors, float32 or int64.

        In a session graph, fetch them between steps.

        Returns:
          ``learning_rate`` of the next update; ``loss_scaling_log2`` if there is a
          scale; ``overflow_frequency``, the fraction of due updates that were skipped;
          ``updates`` and ``skipped_updates``; ``global_norm`` of the last update's
          mean gradient before clipping; and ``micro_batches_dropped`` with
          ``on_nonfinite="drop_micro_batch"`` and accumulation.
        """
        updater = self._built()
        with self._scope():
            scalars = self._shared.scalars
            with tf.device(scalars.host or None):
                updates = scalars.updates.read_value()
                skipped = scalars.skipped.read_value()
                due = tf.maximum(updates + skipped, 1)
                values = {
                    "learning_rate": tf.cast(
                        next_rate(self._settings.learning_rate, scalars.updates),
                        tf.float32,
                    ),
                    "overflow_frequency": tf.cast(skipped, tf.float32)
                    / tf.cast(due, tf.float32),
                    "updates": updates,
                    "skipped_updates": skipped,
                    "global_norm": updater.global_norm.read_value(),
                }
                if (log2 := scalars.log2) is not None:
                    values["loss_scaling_log2"] = tf.cast(log2.read_value(), tf.float32)
                accumulator = updater.accumulator
                if accumulator is not None and accumulator.dropped is not None:
                    values["micro_batches_dropped"] = accumulator.dropped.read_value()
                return values

    def nonfinite_names(self, flags: Any) -> list[list[str]]:
        """Lists, per tower, the names of variables whose [K, N] ``flags`` are set.

        Args:
          flags: the value of the tensor that ``nonfinite_gradients`` returned.

        Raises:
          ValueError: ``flags`` has another shape, or is not bool.
        """
        variables = self._built().variables
        try:
            array = np.asarray(flags.numpy() if hasattr(flags, "numpy") else flags)
        except ValueError:  # rows of unequal length
            array = np.asarray(None)
        wanted = (len(variables), len(variables[0]))
        if array.shape != wanted or array.dtype != np.bool_:
            raise ValueError(
                f"flags must be [towers, variables] bools, here {list(wanted)}, the "
                f"value of nonfinite_gradients; got {flags!r}."
            )
        return [
            [name_of(v) for flag, v in zip(row, tower, strict=True) if flag]
            for row, tower in zip(array, variables, strict=True)
        ]

    @without_autograph
    def copy_to_replicas(self) -> tf.Operation | None:
        """Copies tower 0's variables and slots to all towers, e.g. after a restore.

        Accumulators are left alone: each tower has its own, and all are saved.

        Returns:
          In a graph the op that copies; eagerly None, after the copy.
        """
        updater = self._built()
        with self._scope():
            return copy_to_replicas(
                [[*own, *wrapped.variables()] for own, wrapped in updater.replicas()]
            )

"""Event files for TensorBoard: an optimizer's statistics, written between steps."""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

import numpy as np
import tensorflow as tf

from tw_ampopt._base import BaseOptimizer
from tw_ampopt._tower_optimizer import TowerOptimizer
from tw_core.devices import canonical_device
from tw_core.internal import check_text, check_whole_number

_COUNTS = ("updates", "skipped_updates")
_MEMORY = "mem_usage_gb"  # the older system's name
_GIB = 2.0**30
# As tf.summary.scalar writes it, which needs TensorBoard to be installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)


class StatisticsWriter:
    """Event files for TensorBoard, with the tags that ``StatisticsHook`` writes."""

    def __init__(self, optimizer: TowerOptimizer, logdir: str) -> None:
        """Opens an event file.

        Args:
          optimizer: optimizer whose statistics are written.
          logdir: folder of the event file, a string or a path.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: ``logdir`` is empty.
        """
        if not isinstance(optimizer, TowerOptimizer):
            raise TypeError(
                "StatisticsWriter: optimizer must be a tw_ampopt.TowerOptimizer; got "
                f"{optimizer!r}. StatisticsHook is for an Optimizer."
            )
        logdir = check_text(logdir=as_text(logdir))
        self._is_closed = False
        self._optimizer = optimizer
        self._writer = tf.summary.create_file_writer(logdir)
        self._interval = Interval(optimizer.statistics())

    def write(self, step: int | None = None) -> None:
        """Writes the statistics; call it between steps, outside of a ``tf.function``.

        Args:
          step: position on the axis; by default the number of updates that were due.

        Raises:
          RuntimeError: inside a ``tf.function``, or after ``close``.
          TypeError: ``step`` is not a whole number.
          ValueError: ``step`` is negative.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "StatisticsWriter.write reads numbers, so it must be called outside of "
                "a tf.function, between its calls."
            )
        if step is not None:
            check_whole_number(step=step, at_least=0)
        if self._is_closed:
            raise RuntimeError(
                "StatisticsWriter.write was called after close; make another writer."
            )
        values = self._interval.close(self._optimizer.statistics(), self._optimizer)
        at = self._interval.due if step is None else step
        with self._writer.as_default():
            for name, value in values.items():
                tag = f"{self._optimizer.id}/{name}"
                tf.summary.write(tag, np.float32(value), step=at, metadata=_SCALAR)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._is_closed = True
        self._writer.close()


class Interval:
    """The statistics between two writes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._counts = [int(values[name]) for name in _COUNTS]

    @property
    def due(self) -> int:
        """Updates that were due by the last write, skipped ones included."""
        return sum(self._counts)

    def close(
        self, values: Mapping[str, Any], optimizer: BaseOptimizer
    ) -> dict[str, float]:
        """Returns the ``values`` to write, with the interval's overflow frequency."""
        before, self._counts = self._counts, [int(values[name]) for name in _COUNTS]
        new = [now - then for now, then in zip(self._counts, before, strict=True)]
        if min(new) < 0:  # the counts were reset meanwhile
            new = self._counts
        closed = {name: float(value) for name, value in values.items()}
        if sum(new):
            closed["overflow_frequency"] = new[1] / sum(new)
        return closed | _memory_of(optimizer)


def _memory_of(optimizer: BaseOptimizer) -> dict[str, float]:
    """Returns the GiB in use on the first device, if wanted and counted there.

    The query starts TensorFlow's eager context: started after a session, the context
    keeps the session's memory settings.
    """
    if not optimizer.report_mem_usage:
        return {}
    devices: Sequence[str] = optimizer.devices
    spec = tf.DeviceSpec.from_string(canonical_device(devices[0]))
    if spec.device_type is None:
        return {}
    name = f"{spec.device_type}:{spec.device_index or 0}"
    try:
        info = tf.config.experimental.get_memory_info(name)
    except ValueError:  # a device that keeps no count
        return {}
    return {_MEMORY: float(info["current"]) / _GIB}


def as_text(path: Any) -> Any:
    """Returns a path as text; other values unchanged, for ``check_text`` to refuse."""
    return fspath(path) if isinstance(path, PathLike) else path

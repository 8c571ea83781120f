"""Writes an optimizer's statistics between the calls of a ``tf.function``."""

import numpy as np
import tensorflow as tf

from tw_ampopt._optimizers.function import TowerOptimizer
from tw_ampopt._summaries.mem_usage import mem_usage
from tw_ampopt._summaries.overflow_interval import OverflowInterval, as_text
from tw_core.checks import check_text, check_whole_number

# What tf.summary.scalar writes, which needs TensorBoard to be installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)


class StatisticsWriter:
    """Event files for TensorBoard, with the tags that ``StatisticsHook`` writes."""

    def __init__(self, optimizer: TowerOptimizer, logdir: str) -> None:
        """Opens an event file.

        Args:
          optimizer: whose statistics.
          logdir: folder of the event file, a string or a path.

        Raises:
          TypeError: an argument of the wrong kind.
          ValueError: an empty ``logdir``.
        """
        if not isinstance(optimizer, TowerOptimizer):
            raise TypeError(
                "StatisticsWriter: optimizer must be a tw_ampopt.TowerOptimizer; got "
                f"{optimizer!r}. StatisticsHook is for an Optimizer."
            )
        logdir = check_text("StatisticsWriter", logdir=as_text(logdir))
        self._is_closed = False
        self._optimizer = optimizer
        self._writer = tf.summary.create_file_writer(logdir)
        self._interval = OverflowInterval(_as_numbers(optimizer.statistics()))

    def write(self, step: int | None = None) -> None:
        """Writes now; call it between steps, outside of a ``tf.function``.

        Args:
          step: where on the axis; by default the number of finished groups.

        Raises:
          RuntimeError: inside a ``tf.function``, or after ``close``.
          TypeError: a step that is no whole number.
          ValueError: a negative step.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "StatisticsWriter.write: reads numbers, and so must be called outside "
                "of a tf.function, between its calls."
            )
        if step is not None:
            check_whole_number("StatisticsWriter.write", step=step, at_least=0)
        if self._is_closed:
            raise RuntimeError(
                "StatisticsWriter.write: comes after close; make another writer."
            )
        values = self._interval.close(_as_numbers(self._optimizer.statistics()))
        if self._optimizer.report_mem_usage:
            values |= mem_usage(self._optimizer.devices)
        at = self._interval.finished if step is None else step
        with self._writer.as_default():
            for name, value in values.items():
                tag = f"{self._optimizer.id}/{name}"
                tf.summary.write(tag, np.float32(value), step=at, metadata=_SCALAR)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._is_closed = True
        self._writer.close()


def _as_numbers(values: dict[str, tf.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}

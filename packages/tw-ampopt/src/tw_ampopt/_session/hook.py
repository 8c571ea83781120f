"""The hook that writes an optimizer's statistics between the steps of a session."""

import logging
from typing import Any

import tensorflow as tf

from tw_ampopt._session.optimizer import Optimizer
from tw_ampopt._summaries import Interval, as_text
from tw_core.internal import check_flag, check_text, check_whole_number

_log = logging.getLogger("tw_ampopt")


class StatisticsHook(
    tf.compat.v1.train.SessionRunHook  # type: ignore[misc] # TensorFlow is untyped
):
    """Event files for TensorBoard, written from a session graph.

    The tags are ``<id>/learning_rate`` and so on, as in the older system.
    ``overflow_frequency`` is the fraction of updates skipped since the hook last wrote,
    and the step is the number of updates that were due, skipped ones included.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        logdir: str,
        *,
        every_steps: int = 100,
        name_nonfinite: bool = False,
    ) -> None:
        """Stores the settings; make the hook after ``apply_updates``.

        Args:
          optimizer: optimizer whose statistics are written.
          logdir: folder of the event file, a string or a path.
          every_steps: session calls between writes, at least 1.
          name_nonfinite: whether to test every call's gradients and log the names of
            variables with non-finite ones; costs a pass over the gradients.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: ``every_steps`` is below 1, or ``logdir`` is empty.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "StatisticsHook: optimizer must be a tw_ampopt.Optimizer; got "
                f"{optimizer!r}. StatisticsWriter is for a TowerOptimizer."
            )
        self._logdir = check_text(logdir=as_text(logdir))
        check_whole_number(every_steps=every_steps, at_least=1)
        check_flag(name_nonfinite=name_nonfinite)
        self._optimizer = optimizer
        self._every_steps = every_steps
        self._name_nonfinite = name_nonfinite
        self._calls = 0
        self._flags: tf.Tensor | None = None

    def begin(self) -> None:
        """Builds the statistics, while the graph can still be changed."""
        self._statistics = self._optimizer.statistics()
        if self._name_nonfinite:
            self._flags = self._optimizer.nonfinite_gradients()
        self._writer = tf.compat.v1.summary.FileWriter(self._logdir)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Records the counts restored from a checkpoint."""
        self._interval = Interval(session.run(self._statistics))

    def before_run(self, run_context: Any) -> Any:
        """Requests the gradients' flags, if names are to be logged."""
        return tf.compat.v1.train.SessionRunArgs(self._flags)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Logs names, and writes every ``every_steps`` calls."""
        if self._flags is not None:
            self._log_names(run_values.results)
        self._calls += 1
        if self._calls % self._every_steps == 0:
            self._write(run_context.session)

    def end(self, session: Any) -> None:
        """Writes once more and closes the event file."""
        if self._calls % self._every_steps:
            self._write(session)
        self._writer.close()

    def _write(self, session: Any) -> None:
        values = self._interval.close(session.run(self._statistics), self._optimizer)
        summary = tf.compat.v1.Summary()
        for name, value in values.items():
            summary.value.add(tag=f"{self._optimizer.id}/{name}", simple_value=value)
        self._writer.add_summary(summary, self._interval.due)
        self._writer.flush()

    def _log_names(self, flags: Any) -> None:
        for k, names in enumerate(self._optimizer.nonfinite_names(flags)):
            if names:
                _log.warning(
                    "%s: tower %d: gradients not finite: %s",
                    self._optimizer.id,
                    k,
                    ", ".join(names),
                )

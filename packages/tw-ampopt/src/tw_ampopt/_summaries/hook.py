"""Writes an optimizer's statistics between the steps of a session."""

import logging
from typing import Any

import tensorflow as tf

from tw_ampopt._optimizers.graph import Optimizer
from tw_ampopt._summaries.mem_usage import MEMORY, mem_usage
from tw_ampopt._summaries.overflow_interval import OverflowInterval, as_text
from tw_core.checks import check_flag, check_text, check_whole_number

_log = logging.getLogger("tw_ampopt")


class StatisticsHook(
    tf.compat.v1.train.SessionRunHook  # type: ignore[misc] # TensorFlow is untyped
):
    """Event files for TensorBoard, written from a session graph.

    The tags are ``<id>/learning_rate`` and so on, as the older system had them.
    ``overflow_frequency`` is the share of skipped updates since the hook last wrote,
    and the step is the number of finished groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        logdir: str,
        *,
        every_steps: int = 100,
        name_nonfinite: bool = False,
    ) -> None:
        """Keeps what to write; make it after ``apply_updates``.

        Args:
          optimizer: whose statistics.
          logdir: folder of the event file, a string or a path.
          every_steps: session calls between writings, at least 1.
          name_nonfinite: whether to look at every call's gradients and log the names
            of variables whose are not finite; costs a pass over the gradients.

        Raises:
          TypeError: an argument of the wrong kind.
          ValueError: ``every_steps`` below 1, or an empty ``logdir``.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "StatisticsHook: optimizer must be a tw_ampopt.Optimizer; got "
                f"{optimizer!r}. StatisticsWriter is for a TowerOptimizer."
            )
        logdir = check_text("StatisticsHook", logdir=as_text(logdir))
        check_whole_number("StatisticsHook", every_steps=every_steps, at_least=1)
        check_flag("StatisticsHook", name_nonfinite=name_nonfinite)
        self._optimizer = optimizer
        self._logdir = logdir
        self._every_steps = every_steps
        self._name_nonfinite = name_nonfinite
        self._calls = 0
        self._flags: tf.Tensor | None = None

    def begin(self) -> None:
        """Builds the summary ops, while the graph can still be changed."""
        self._statistics = self._optimizer.statistics()
        if self._name_nonfinite:
            self._flags = self._optimizer.nonfinite_gradients()
        self._feeds = {
            name: tf.compat.v1.placeholder(tf.float32, [])
            for name in [*self._statistics, MEMORY]
        }
        self._summaries = {
            # Not tf.compat.v1.summary.scalar, whose tags are names of ops: it renames
            # a tag when an op or a variable has that name already.
            name: tf.raw_ops.ScalarSummary(
                tags=f"{self._optimizer.id}/{name}", values=feed
            )
            for name, feed in self._feeds.items()
        }
        self._writer = tf.compat.v1.summary.FileWriter(self._logdir)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Notes the counts that a checkpoint brought."""
        self._interval = OverflowInterval(session.run(self._statistics))

    def before_run(self, run_context: Any) -> Any:
        """Asks for the flags of gradients, where names are wanted."""
        return tf.compat.v1.train.SessionRunArgs(self._flags)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Logs names, and writes at every so many calls."""
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
        values = self._interval.close(session.run(self._statistics))
        if self._optimizer.report_mem_usage:
            values |= mem_usage(self._optimizer.devices)
        feeds = {self._feeds[name]: value for name, value in values.items()}
        written = session.run([self._summaries[name] for name in values], feeds)
        for summary in written:
            self._writer.add_summary(summary, self._interval.finished)
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

"""Metrics and logs over all ranks' rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.internal import tf_variable
from tw_core.ranks import RankGroup
from tw_keras._update.gradients import name_of, unnumbered


class Results:
    """The results of one rank's steps, and their sums over ranks."""

    def __init__(self, group: RankGroup) -> None:
        """Starts without a step."""
        self._group = group
        self._logs: dict[str, list[str]] = {}  # names, by method
        self._parted: list[tuple[Any, Any]] = []  # metrics' variables, own states

    def note_step(self, method: str, logs: Any) -> None:
        """Records a step's results, for later when this rank has no batch."""
        self._logs[method] = [
            name
            for name, own in sorted(logs.items() if isinstance(logs, dict) else ())
            if tf.is_tensor(own) and own.dtype.is_floating and own.shape.rank == 0
        ]

    @property
    def has_stepped(self) -> bool:
        """Whether this rank has built or run a step."""
        return "train_step" in self._logs

    def merge_metrics(self, metrics: Sequence[Any]) -> None:
        """Adds the states of metrics over the ranks, until ``part_metrics``."""
        variables = [v for metric in metrics for v in metric.variables]
        if not variables:
            return
        values = [tf_variable(v).read_value() for v in variables]
        names = [unnumbered(name_of(own)) for own in variables]
        totals = self._group.sum(values, names=names)
        self._parted = list(zip(variables, values, strict=True))
        for variable, total in zip(variables, totals, strict=True):
            variable.assign(total)

    def part_metrics(self) -> None:
        """Restores this rank's states of metrics: some are not reset by epoch."""
        for variable, own in self._parted:
            variable.assign(own)
        self._parted = []

    def merge_logs(
        self, method: str, logs: Any, results: dict[str, Any]
    ) -> tuple[Any, list[str]]:
        """Averages logs that are not metrics over the ranks that had a batch.

        Returns the logs, and the names of those that are ``results`` of metrics: a step
        may return some metrics and not others.
        """
        names = self._logs.get(method, [])
        if not names or set(names) == set(results):  # Keras uses the metrics'
            return logs, []
        own = [logs[n] if logs else 0.0 for n in names]
        shown = [
            bool(logs) and n in results and _are_same(logs[n], results[n])
            for n in names
        ]
        numbers = [*own, *shown, bool(logs)]
        scalars = tf.stack([tf.cast(number, tf.float64) for number in numbers])
        (total,) = self._group.sum([scalars], names=["logs of the last batches"])
        count = len(names)
        averages = tf.math.divide_no_nan(total[:count], total[-1])
        are_metrics = tf.equal(total[count:-1], total[-1]).numpy()
        merged = dict(zip(names, tf.unstack(averages), strict=True))
        return {**logs, **merged}, [
            n for n, is_one in zip(names, are_metrics, strict=True) if is_one
        ]


def _are_same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True))

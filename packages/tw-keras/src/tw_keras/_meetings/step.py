"""A step's settings, and how the towers' values are combined."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.internal import Gradients, weigh
from tw_keras._batches import join
from tw_keras._copies.copies import Copies
from tw_keras._meetings.report import Report
from tw_reduce.internal import add_on_device, mean_by_weight, means_of


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step's settings, known before tower 0 runs it for all towers."""

    copies: Copies
    is_alone: bool = False  # Tower 0 runs on the whole batch, eagerly.
    trains: bool = True
    average: bool = False  # whether losses are means, not sums
    report: Report = field(default_factory=partial(Report, (), None))
    lent: Any = None  # how many towers, the last ones, have only padding rows
    rescaled: frozenset[str] = frozenset()  # reductions of losses that need a factor

    @property
    def ranks(self) -> Any:
        """The other ranks that take part in the step, or None."""
        return self.copies.ranks_in_steps if self.trains else self.copies.ranks

    @property
    def is_one_device(self) -> bool:
        """Whether tower 0 runs on all rows of all processes."""
        return self.is_alone and self.ranks is None

    @property
    def is_whole(self) -> bool:
        """Whether one tower has all rows of all processes."""
        is_one = self.is_alone or len(self.copies.towers) == 1
        return is_one and self.ranks is None

    def merged(self, *values: Any, adds: bool, is_mean: bool = False) -> Any:
        """Combines the towers' values into the value over all rows."""
        if values[0] is None or not tf.is_tensor(values[0]):
            return values[0]
        if values[0].shape.rank != 0:
            return join(values, self.lent)
        if adds or not values[0].dtype.is_floating:
            return tf.add_n(self.of_own_rows(values))
        return self.mean(values, is_mean=is_mean)

    def of_own_rows(self, values: Sequence[Any]) -> list[Any]:
        """Zeroes the values of towers with only padding rows."""
        if self.lent is None:
            return list(values)
        rows = len(values) - self.lent
        none = tf.zeros_like(values[0])
        return [tf.where(k < rows, value, none) for k, value in enumerate(values)]

    def mean(self, values: Sequence[Any], *, is_mean: bool = False) -> Any:
        """Averages the towers' losses, or adds them where they are sums.

        With ``is_mean`` they are averaged anyway.
        """
        averages = self.average or is_mean
        add: Any = partial(add_on_device, device=self.copies.towers[0].device)
        if averages:
            weights = self.report.weights if self.average else self.report.rows
            by: Any = partial(mean_by_weight, add, weights or ())
            add = by if weights else means_of(add)
        else:
            values = self.of_own_rows(values)
        # If a tower is known to have no rows, Keras's loss is an empty vector.
        values = [own if own.shape.rank == 0 else tf.reduce_sum(own) for own in values]
        merged = add(Gradients([value] for value in values))[0][0]
        # Ranks' results are averaged by rows later.
        share = self.report.share_of_rank()
        if share is not None and not averages:
            return tf.math.divide_no_nan(merged, tf.cast(share, merged.dtype))
        is_by_rows = self.copies.weigh is None or not self.average
        if is_by_rows or self.ranks is None or not self.trains:
            return merged
        return weigh(merged, self.report.weight_per_row())

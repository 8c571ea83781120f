"""A step's settings, and how the towers' values are combined."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from tw_core.internal import weigh
from tw_keras._batches import join
from tw_keras._copies import Copies
from tw_reduce import Reducer, mean, sum_on_device


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step's settings, known before tower 0 runs it for all towers."""

    copies: Copies
    is_alone: bool = False  # Tower 0 runs on the whole batch, eagerly.
    trains: bool = True
    average: bool = False  # whether losses are means, not sums
    weights: Sequence[Any] | None = None  # [K], of losses; None for equal ones
    rows: Sequence[Any] = ()  # [K]
    lent: Any = None  # how many towers, the last ones, have only padding rows
    synchronized: Sequence[str] = ()  # layers by which a loss reaches other towers
    rescaled: frozenset[str] = frozenset()  # reductions of losses that need a factor
    checksum: Any = None  # of a batch that ranks share
    share: Callable[[], tf.Tensor] | None = None  # this rank's, of a batch's rows

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

    @property
    def reducer(self) -> Reducer | None:
        """The sum over towers; for one device, only a reducer that was given."""
        return self.copies.reducer if self.is_one_device else self.copies.add

    def parts(self) -> list[tf.Tensor]:
        """Returns the [K] towers' fractions of the whole batch.

        Where ranks do not train, they may have different numbers of batches; each then
        uses its share of the batch's rows.
        """
        own = [tf.cast(weight, tf.float64) for weight in self.weights or self.rows]
        total = tf.add_n(own)
        if self.ranks is not None and self.trains:
            [total] = self.ranks.in_steps.sum_layer("weights of losses", [total])
        parts = [tf.math.divide_no_nan(weight, total) for weight in own]
        if self.share is None or self.trains:
            return parts
        return [part * self.share() for part in parts]

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
        return [tf.where(k < rows, own, none) for k, own in enumerate(values)]

    def mean(self, values: Sequence[Any], *, is_mean: bool = False) -> Any:
        """Averages the towers' losses, or adds them where they are sums.

        With ``is_mean`` they are averaged anyway.
        """
        averages = self.average or is_mean
        reducer: Reducer = partial(sum_on_device, device=self.copies.towers[0].device)
        if averages:
            weights = self.weights if self.average else self.rows
            reducer = mean(reducer, weights=weights)
        else:
            values = self.of_own_rows(values)
        # If a tower is known to have no rows, Keras's loss is an empty vector.
        values = [own if own.shape.rank == 0 else tf.reduce_sum(own) for own in values]
        merged = reducer([[value] for value in values])[0][0]
        # Ranks' results are averaged by rows later.
        if self.share is not None and not averages:
            return tf.math.divide_no_nan(merged, tf.cast(self.share(), merged.dtype))
        is_by_rows = self.copies.weigh is None or not self.average
        if is_by_rows or self.ranks is None or not self.trains:
            return merged
        return weigh(merged, self._weight_per_row)

    @cached_property
    def _weight_per_row(self) -> tf.Tensor:
        """This rank's share of the weights, as a multiple of its share of the rows."""
        share = self.share() if self.share else 1.0
        return tf.math.divide_no_nan(tf.add_n(self.parts()), share)

"""What a step knows of the whole batch before its forward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Totals = Callable[[tf.Tensor, tf.Tensor], Sequence[tf.Tensor]]


class Report:
    """The weights and rows of a batch, of this rank's towers and over all ranks."""

    def __init__(
        self,
        rows: Sequence[Any],
        weights: Sequence[Any] | None,
        totals: Totals | None = None,
        *,
        trains_alone: bool = False,
    ) -> None:
        """Takes [K] rows, and weights; None where towers' losses have equal ones.

        ``totals``: returns weight and rows over all ranks, float64, from those of this
        rank; None without other ranks. ``trains_alone``: those are of results only, and
        this rank updates by its own batch.
        """
        self.rows, self.weights = rows, weights
        self._has_ranks = totals is not None
        self._is_whole = totals is None or trains_alone
        # At once: branches of a step may ask, and neither has the other's tensors.
        wide_rows = _wide(rows)
        self._wide = wide_rows if weights is None else _wide(weights)
        self._own_weight, self._own_rows = _total(self._wide), _total(wide_rows)
        # The batch's weight and rows, over all ranks; float64.
        own = self._own_weight, self._own_rows
        self._all: Sequence[tf.Tensor] = own if totals is None else totals(*own)

    @property
    def weight(self) -> tf.Tensor:
        """The weight of the batch that an update is of; float64."""
        return self._own_weight if self._is_whole else self._all[0]

    def parts(self) -> list[tf.Tensor]:
        """Returns the [K] towers' fractions of the whole batch, by weight."""
        return [tf.math.divide_no_nan(weight, self.weight) for weight in self._wide]

    @property
    def is_plain(self) -> bool:
        """Whether the mean over the batch is that over the towers, with equal parts."""
        return self._is_whole and self.weights is None

    def shares(self, *, is_late: bool) -> tuple[Sequence[Any] | None, tf.Tensor | None]:
        """Returns [K] factors whose products add up to a mean; None for a plain one.

        If ``is_late`` they are weights, and the second is the factor of their sum: then
        gradients of a short step are sent before the report of other ranks is there.
        """
        if self.is_plain:
            return None, None
        if not is_late:
            return self.parts(), None
        return self._wide, tf.math.reciprocal_no_nan(self.weight)

    def share_of_rank(self) -> tf.Tensor | None:
        """Returns this rank's part of the batch's rows; None without other ranks."""
        if not self._has_ranks:
            return None
        return tf.math.divide_no_nan(self._own_rows, self._all[1])

    def weight_per_row(self) -> tf.Tensor:
        """Returns this rank's part of the weight, as a multiple of that of the rows."""
        weight, rows = self._all
        return tf.math.divide_no_nan(self._own_weight * rows, weight * self._own_rows)


def _wide(numbers: Sequence[Any]) -> list[tf.Tensor]:
    return [tf.cast(number, tf.float64) for number in numbers]


def _total(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds numbers; 0 where a step has no report."""
    return tf.add_n(numbers) if numbers else tf.zeros([], tf.float64)

"""Weights of towers and micro-batches in a mean.

Weights are measured in a unit. If the first ones are equal, it is their common value:
they are exactly 1, and products with them keep every bit. Otherwise it is a power of
two, so that whole numbers, such as counts of rows, stay exact.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_ampopt._update.buffers import Buffer, sum_of_calls, to_wide
from tw_ampopt._variables import make_state
from tw_core.internal import scalar_of, scale, shares_of, unit_of, weigh

Shares = Sequence[tf.Tensor]
"""[K] float64 scalars, each tower's weight in the unit."""


def as_tensors(weights: Sequence[Any]) -> list[tf.Tensor]:
    """Converts weights to [K] float64 scalars, on the current device."""
    return [scalar_of(weight, tf.float64) for weight in weights]


def total_of(shares: Shares, dtype: tf.DType) -> tf.Tensor:
    """Returns the divisor of weighted sums: the shares' total, or K if that is 0."""
    total = tf.add_n(list(shares))
    number = tf.constant(len(shares), tf.float64)
    total = tf.where(tf.equal(total, 0), number, total)
    return tf.cast(total, dtype)


def mean_of_calls(calls: Sequence[tuple[Buffer | None, Any]]) -> Buffer | None:
    """Averages one variable's gradients over the calls that list it."""
    grads, weights = zip(*calls, strict=True)
    if len(calls) == 1 or all(grad is None for grad in grads):
        return grads[0]
    shares = shares_of(weights)
    own = [
        weigh(to_wide(grad), share)
        for grad, share in zip(grads, shares, strict=True)
        if grad is not None
    ]
    added = sum_of_calls(own)
    return scale(added, 1.0 / total_of(shares, added.dtype))


class AccumulatedWeight:
    """The total weight of one update's micro-batches."""

    def __init__(self, num_towers: int, host: str, dtype: tf.DType) -> None:
        """Makes the state; ``dtype`` is that of divisors."""
        self._num_towers, self._dtype = num_towers, dtype
        zero = partial(tf.zeros, [], tf.float64)
        # The total in the unit, less 1 for each tower of each micro-batch, so that 0 is
        # right for a group that an older version, without weights, has begun.
        self.excess = make_state(zero, name="grad_acc_weight", device=host)
        # 0 until the unit is known.
        self.unit = make_state(zero, name="grad_acc_weight_unit", device=host)

    def state(self) -> list[tf.Variable]:
        """Lists the variables to be saved and reset."""
        return [self.excess, self.unit]

    def begin(
        self, weights: Sequence[Any] | None, summed: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns a micro-batch's shares, after ``summed`` others, and their unit."""
        own = as_tensors([1.0] * self._num_towers if weights is None else weights)
        stored = self.unit.read_value()
        known = tf.where(stored > 0, stored, tf.ones_like(stored))
        has_weight = self._total(summed) > 0
        unit = tf.where(has_weight, known, unit_of(own))
        return [tf.math.divide_no_nan(weight, unit) for weight in own], unit

    def add(self, shares: Shares, unit: tf.Tensor) -> list[Any]:
        """Records the weights of a micro-batch that is added."""
        more = tf.add_n(list(shares)) - float(self._num_towers)
        return [
            self.excess.assign_add(more, read_value=False),
            self.unit.assign(unit, read_value=False),
        ]

    def divisor(self, summed: tf.Tensor) -> tf.Tensor:
        """Returns the divisor of the sums of ``summed`` micro-batches."""
        total = self._total(summed)
        count = tf.cast(summed, tf.float64) * float(self._num_towers)
        return tf.cast(tf.where(total > 0, total, count), self._dtype)

    def clear(self) -> list[Any]:
        """Returns the ops that reset the state."""
        return [variable.assign(0.0, read_value=False) for variable in self.state()]

    def _total(self, summed: tf.Tensor) -> tf.Tensor:
        count = tf.cast(summed, tf.float64) * float(self._num_towers)
        return count + self.excess.read_value()

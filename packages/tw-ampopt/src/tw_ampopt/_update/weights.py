"""What towers and micro-batches weigh in a mean.

Weights count in a unit. Where those that come first are equal, it is what each weighs:
they are exactly 1, and products with them keep every bit. Else it is a power of two, so
that whole numbers, such as those of rows, stay exact.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_ampopt._update.buffers import Buffer, sum_of_calls, to_float32
from tw_ampopt._variables import make_state
from tw_core.gradients import map_values, scale
from tw_reduce.reducers import shares_of, unit_of

Shares = Sequence[tf.Tensor]
"""[K] float64 scalars, what each tower weighs in the unit."""


def as_tensors(weights: Sequence[Any]) -> list[tf.Tensor]:
    """Makes [K] float64 scalars of numbers and scalar tensors, on this device."""
    return [
        tf.cast(weight, tf.float64)
        if tf.is_tensor(weight)
        else tf.constant(weight, tf.float64)
        for weight in weights
    ]


def total_of(shares: Shares) -> tf.Tensor:
    """Returns what weighted sums are divided by, float32; the number where it is 0."""
    total = tf.add_n(list(shares))
    number = tf.constant(len(shares), tf.float64)
    total = tf.where(tf.equal(total, 0), number, total)
    return tf.cast(total, tf.float32)


def weighed(buffer: Buffer, share: tf.Tensor) -> Buffer:
    """Multiplies a gradient; one that weighs nothing is 0, even if it is NaN."""

    def weigh(values: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(values, tf.cast(share, values.dtype))

    return map_values(weigh, buffer)


def mean_of_calls(
    calls: Sequence[Buffer | None], weights: Sequence[Any]
) -> Buffer | None:
    """Averages a tower's gradients from several calls, in float32.

    Args:
      calls: [calls] gradients for one variable.
      weights: [calls] numbers or scalar tensors; those of calls that reach the variable
        count.

    Returns:
      The mean; None where no call reaches the variable, and a single call as it is.
    """
    reached = [
        (grad, weight)
        for grad, weight in zip(calls, weights, strict=True)
        if grad is not None
    ]
    if len(reached) < 2:
        return reached[0][0] if reached else None
    shares = shares_of([weight for _, weight in reached])
    own = [
        weighed(to_float32(grad), share)
        for (grad, _), share in zip(reached, shares, strict=True)
    ]
    return scale(sum_of_calls(own), 1.0 / total_of(shares))


class AccumulatedWeight:
    """What the micro-batches of one update weigh together.

    Attributes:
      excess: their total in the unit, less 1 for each tower of each of them, so that 0
        is right for a group that an older version has begun, which had no weights.
      unit: that the weights of the group are divided by; 0 before it is known.
    """

    def __init__(self, num_towers: int, host: str) -> None:
        """Makes the state.

        Args:
          num_towers: K.
          host: where it lives.
        """
        self._num_towers = num_towers
        zero = partial(tf.zeros, [], tf.float64)
        self.excess = make_state(zero, name="grad_acc_weight", device=host)
        self.unit = make_state(zero, name="grad_acc_weight_unit", device=host)

    def state(self) -> list[tf.Variable]:
        """Lists the variables to be saved and reset."""
        return [self.excess, self.unit]

    def begin(
        self, weights: Sequence[Any] | None, summed: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns what the towers of a micro-batch weigh, and the unit of that.

        Args:
          weights: [K]; None for 1 each.
          summed: int64 scalar, the micro-batches that were added before.
        """
        own = as_tensors([1.0] * self._num_towers if weights is None else weights)
        stored = self.unit.read_value()
        known = tf.where(stored > 0, stored, tf.ones_like(stored))
        has_weight = self._total(summed) > 0
        unit = tf.where(has_weight, known, unit_of(own))
        return [tf.math.divide_no_nan(weight, unit) for weight in own], unit

    def add(self, shares: Shares, unit: tf.Tensor) -> list[Any]:
        """Notes the weights of a micro-batch that is added."""
        more = tf.add_n(list(shares)) - float(self._num_towers)
        return [
            self.excess.assign_add(more, read_value=False),
            self.unit.assign(unit, read_value=False),
        ]

    def divisor(self, summed: tf.Tensor) -> tf.Tensor:
        """Returns what the sums are divided by, a float32 scalar.

        Args:
          summed: int64 scalar, the micro-batches that were added. Where these weigh
            nothing, the sums are 0 and their number divides them.
        """
        total = self._total(summed)
        count = tf.cast(summed, tf.float64) * float(self._num_towers)
        return tf.cast(tf.where(total > 0, total, count), tf.float32)

    def clear(self) -> list[Any]:
        """Starts over."""
        return [variable.assign(0.0, read_value=False) for variable in self.state()]

    def _total(self, summed: tf.Tensor) -> tf.Tensor:
        count = tf.cast(summed, tf.float64) * float(self._num_towers)
        return count + self.excess.read_value()

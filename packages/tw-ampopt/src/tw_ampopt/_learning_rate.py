"""A learning rate: a number, a tensor, a variable, or a schedule of updates."""

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

LearningRateLike: TypeAlias = (
    float | tf.Tensor | tf.Variable | Callable[[tf.Tensor], Any]
)


class LearningRate:
    """Serves a rate in the form in which each family of optimizers takes it."""

    def __init__(self, value: LearningRateLike, updates: tf.Variable) -> None:
        """Keeps the rate.

        Args:
          value: a number, a scalar tensor or variable, or a schedule: called with
            the number of updates made so far (int64 scalar).
          updates: counts the updates.
        """
        self._value = value
        self._updates = updates

    def for_optimizer(self) -> Any:
        """Returns a number, or a function of no arguments that gives the rate.

        All families take both, and call the function in the graph that they
        build their update in.
        """
        return self._value if _is_number(self._value) else self.tensor

    def tensor(self) -> tf.Tensor:
        """Returns the rate of the next update as a float32 scalar."""
        value = self._value
        if callable(value) and not isinstance(value, tf.Variable | tf.Tensor):
            value = value(self._updates.read_value())
        return tf.cast(tf.convert_to_tensor(value), tf.float32)


def check_learning_rate(value: object, *, caller: str) -> None:
    """Refuses what is no learning rate.

    Raises:
      TypeError: neither number, tensor, variable nor function.
    """
    known = _is_number(value) or tf.is_tensor(value) or callable(value)
    if not known and not isinstance(value, tf.Variable):
        raise TypeError(
            f"{caller}: learning_rate is a number, a scalar tensor or variable, or a "
            f"schedule (a function of the number of updates); got {value!r}."
        )


def same_rate(one: object, other: object) -> bool:
    """Tells whether two rates are one and the same."""
    if one is other:
        return True
    return _is_number(one) and _is_number(other) and one == other


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""A learning rate: a number, a tensor, a variable, or a schedule of updates."""

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from tw_ampopt._checks.arguments import check_numeric_scalar

LearningRateLike: TypeAlias = (
    float | tf.Tensor | tf.Variable | Callable[[tf.Tensor], Any]
)


class LearningRate:
    """Serves a rate in the form in which each family of optimizers takes it."""

    def __init__(
        self, value: LearningRateLike, updates: tf.Variable, *, caller: str
    ) -> None:
        """Keeps the rate.

        Args:
          value: a number, a scalar tensor or variable, or a schedule: called with
            the number of updates made so far (int64 scalar).
          updates: counts the updates.
          caller: opens messages.
        """
        self._caller = f"{caller}: what the schedule learning_rate returns"
        self._value = value
        self._updates = updates

    def for_optimizer(self) -> Any:
        """Returns a number, or a function of no arguments that gives the rate.

        All families take both, and call the function in the graph that they
        build their update in.
        """
        return self._value if _is_number(self._value) else self.tensor

    def tensor(self) -> tf.Tensor:
        """Returns the rate of the next update as a float32 scalar.

        Raises:
          TypeError: a schedule that returns something else than a number.
          ValueError: a schedule that returns no scalar.
        """
        value = self._value
        if callable(value) and not isinstance(value, tf.Variable | tf.Tensor):
            value = value(self._updates.read_value())
            self._check_returned(value)
        return tf.cast(tf.convert_to_tensor(value), tf.float32)

    def _check_returned(self, value: object) -> None:
        if isinstance(value, tf.Tensor | tf.Variable):
            _check_tensor(value, self._caller)
        elif not _is_number(value) and not hasattr(value, "dtype"):
            raise TypeError(
                f"{self._caller} must be a number or a scalar tensor; got {value!r}."
            )


def check_learning_rate(value: object, *, caller: str) -> None:
    """Refuses what is no learning rate; a negative one is fine.

    Raises:
      TypeError: neither number, tensor, variable nor function of one argument; or a
        tensor that is not numeric.
      ValueError: NaN or infinite, or a tensor that is no scalar.
    """
    if _is_number(value):
        _check_finite(value, caller)
    elif isinstance(value, tf.Tensor | tf.Variable):
        _check_tensor(value, caller)
    elif not callable(value) or not _takes_one(value):
        raise TypeError(
            f"{caller}: learning_rate must be a number, a scalar tensor or variable, "
            f"or a schedule (a function of the number of updates); got {value!r}."
        )


def same_rate(one: object, other: object) -> bool:
    """Compares two rates; tensors and schedules are equal only to themselves."""
    return one is other or (_is_number(one) and _is_number(other) and one == other)


def _check_tensor(value: Any, caller: str) -> None:
    check_numeric_scalar(value, name="learning_rate", caller=caller)
    if isinstance(value, tf.Tensor):
        _check_finite(tf.get_static_value(value), caller)


def _check_finite(value: Any, caller: str) -> None:
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{caller}: learning_rate must be finite; got {value}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _takes_one(schedule: Callable[..., Any]) -> bool:
    try:
        inspect.signature(schedule).bind(0)
    except TypeError:
        return False
    except ValueError:  # a builtin that keeps its signature to itself
        return True
    return True

"""Loss-scale rules: how the log2 of the scale follows good and bad updates.

A rule is a frozen description. Its state is a handful of scalars that are kept in
variables elsewhere; the rule defines how they start and how they change. All rules
except the gradual one change the log2 in whole steps and build the scale by writing the
exponent of a float, so that scaling changes no bit of a mantissa.

In the formulas s is the log2 of the scale, which is 2**s; an update is good when every
gradient is finite; and clip keeps s within ``lowest`` and ``highest``.

The gradual rule is StyleGAN2's (``dnnlib/tflib/optimizer.py``); the dynamic rule is
that of Micikevicius et al., "Mixed Precision Training" (2018), with the
hysteresis of Megatron-LM.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import tensorflow as tf

from tw_core.internal import check_number

ScaleState: TypeAlias = dict[str, tf.Tensor]

_LEFT = "tolerance"  # bad updates that the dynamic rule still tolerates
_LN2 = math.log(2.0)
# Leaves room below float32's 2**127 for a factor, the number of towers.
_LARGEST_LOG2 = 120
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127


@runtime_checkable
class LossScale(Protocol):
    """A loss-scale rule."""

    def initial(self) -> dict[str, int | float]:
        """Returns the state at the start, by name; ``{}`` for no scaling.

        ``"log2"`` is the log2 of the scale. A float is kept as float32, an int
        as int64.
        """
        ...

    def scale(self, log2: tf.Tensor) -> tf.Tensor:
        """Returns 2**log2 as a float32 scalar."""
        ...

    def next(self, state: Mapping[str, tf.Tensor], good: tf.Tensor) -> ScaleState:
        """Returns the entries of the state that change after one update.

        Args:
          state: scalars, by the names of ``initial``.
          good: bool scalar, whether every gradient was finite.
        """
        ...


@dataclass(frozen=True)
class GradualLossScale:
    """Raises the scale a little after a good update, lowers it a lot after a bad one.

    ``s = clip(s + increment)`` after a good update, ``s = clip(s - decrement)`` after
    a bad one.

    Attributes:
      init: log2 of the scale at the start.
      increment: added to the log2 after a good update.
      decrement: subtracted from the log2 after a bad update.
      lowest: lower bound of the log2.
      highest: upper bound of the log2.

    Raises:
      TypeError: a value that is not a number.
      ValueError: bounds that exclude ``init``, that are out of order or that
        float32 cannot hold; a step of the log2 that is negative or not finite.
    """

    init: float = 64.0
    increment: float = 0.0005
    decrement: float = 1.0
    lowest: float = 0.0
    highest: float = 120.0

    def __post_init__(self) -> None:
        for name in ("init", "lowest", "highest"):
            check_number(finite=False, **{name: getattr(self, name)})
        for name in ("increment", "decrement"):
            check_number(at_least=0, **{name: getattr(self, name)})
        _check_bounds(self.init, self.lowest, self.highest)

    def initial(self) -> dict[str, int | float]:
        """Returns the log2 as a float."""
        return {"log2": float(self.init)}

    def scale(self, log2: tf.Tensor) -> tf.Tensor:
        """Returns exp(log2 * ln 2), for fractional log2 too."""
        return tf.exp(log2 * tf.constant(_LN2, tf.float32))

    def next(self, state: Mapping[str, tf.Tensor], good: tf.Tensor) -> ScaleState:
        """Returns the log2 one step up or down, within the bounds."""
        log2 = state["log2"]
        moved = tf.where(good, log2 + self.increment, log2 - self.decrement)
        return {"log2": tf.clip_by_value(moved, self.lowest, self.highest)}


@dataclass(frozen=True)
class DynamicLossScale:
    """Doubles the scale after a run of good updates, and halves it after a bad one.

    ``s = clip(s + 1)`` once ``growth_interval`` updates in a row were good, after
    which they are counted from 0 again; ``s = clip(s - 1)`` after a bad update,
    except for the first ``hysteresis - 1`` bad ones since such an interval was
    completed.

    Attributes:
      init: log2 of the scale at the start.
      growth_interval: good updates in a row before the scale doubles.
      lowest: lower bound of the log2.
      highest: upper bound of the log2.
      hysteresis: bad updates, counted since the last completed growth interval,
        of which the last and all further ones halve the scale; 1 halves at once.

    Raises:
      ValueError: bounds that exclude ``init``, that are out of order or that
        float32 cannot hold; an interval or hysteresis below 1.
      TypeError: a number that is not an int.
    """

    init: int = 15
    growth_interval: int = 2000
    lowest: int = 0
    highest: int = 24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        _check_ints(vars(self))
        _check_bounds(self.init, self.lowest, self.highest)
        for name in ("growth_interval", "hysteresis"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1 update; got {getattr(self, name)}."
                )

    def initial(self) -> dict[str, int | float]:
        """Returns the log2, the good updates in a row, and the bad ones to tolerate."""
        state: dict[str, int | float] = {"log2": self.init, "good_steps": 0}
        return state if self.hysteresis == 1 else state | {_LEFT: self.hysteresis}

    def scale(self, log2: tf.Tensor) -> tf.Tensor:
        """Returns 2**log2, exactly."""
        return _power_of_two(log2)

    def next(self, state: Mapping[str, tf.Tensor], good: tf.Tensor) -> ScaleState:
        """Returns the new counts, and the new log2."""
        log2, zero = state["log2"], tf.zeros_like(state["log2"])
        good_steps = tf.where(good, state["good_steps"] + 1, zero)
        grows = good_steps >= self.growth_interval
        changes = {"good_steps": tf.where(grows, zero, good_steps)}
        lower = log2 - 1
        if _LEFT in state:
            left = tf.where(good, state[_LEFT], tf.maximum(state[_LEFT] - 1, zero))
            lower = tf.where(left > 0, log2, lower)
            changes[_LEFT] = tf.where(grows, zero + self.hysteresis, left)
        moved = tf.where(good, log2 + tf.cast(grows, log2.dtype), lower)
        return {**changes, "log2": tf.clip_by_value(moved, self.lowest, self.highest)}


@dataclass(frozen=True)
class StaticLossScale:
    """A constant power of two: ``s = log2`` after every update.

    Attributes:
      log2: log2 of the scale.

    Raises:
      ValueError: a log2 that float32 cannot hold.
      TypeError: a log2 that is not an int.
    """

    log2: int = 15

    def __post_init__(self) -> None:
        _check_ints(vars(self))
        _check_bounds(self.log2, self.log2, self.log2)

    def initial(self) -> dict[str, int | float]:
        """Returns the log2."""
        return {"log2": self.log2}

    def scale(self, log2: tf.Tensor) -> tf.Tensor:
        """Returns 2**log2, exactly."""
        return _power_of_two(log2)

    def next(self, state: Mapping[str, tf.Tensor], good: tf.Tensor) -> ScaleState:
        """Returns no change."""
        return {}


@dataclass(frozen=True)
class NoOpLossScale:
    """No scaling; updates with gradients that are not finite are still skipped."""

    def initial(self) -> dict[str, int | float]:
        """Returns no state."""
        return {}

    def scale(self, log2: tf.Tensor) -> tf.Tensor:
        """Returns 1."""
        return tf.ones([], tf.float32)

    def next(self, state: Mapping[str, tf.Tensor], good: tf.Tensor) -> ScaleState:
        """Returns no change."""
        return {}


def _power_of_two(log2: tf.Tensor) -> tf.Tensor:
    """Returns 2**log2 exactly, unlike ``exp2``, for integer log2 in -126..127."""
    bits = (tf.cast(log2, tf.int32) + _EXPONENT_BIAS) * (1 << _MANTISSA_BITS)
    return tf.bitcast(bits, tf.float32)


def _check_ints(values: Mapping[str, object]) -> None:
    wrong = {
        name: value
        for name, value in values.items()
        if isinstance(value, bool) or not isinstance(value, int)
    }
    if wrong:
        raise TypeError(
            "The log2 of the scale is an integer, so every number must be an int; got "
            f"{wrong}. GradualLossScale takes fractions."
        )


def _check_bounds(init: float, lowest: float, highest: float) -> None:
    largest = _LARGEST_LOG2
    if not (-largest <= lowest <= highest <= largest):
        raise ValueError(
            f"The log2 of the scale must be within -{largest}..{largest}, with lowest "
            f"<= highest; got lowest={lowest}, highest={highest}."
        )
    if not lowest <= init <= highest:
        raise ValueError(
            f"The initial log2 must be within the bounds; got init={init}, "
            f"lowest={lowest}, highest={highest}. Change init or the bounds."
        )

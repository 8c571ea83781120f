"""What optimizers are made with: checked once, and kept as plain values."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tw_ampopt._loss_scale.rules import GradualLossScale, LossScale, NoOpLossScale
from tw_ampopt._wrapped.factory import (
    LearningRate,
    LearningRateLike,
    OptimizerFactory,
    check_learning_rate,
    find_factory,
    make_wrapped,
    same_rate,
)
from tw_ampopt._wrapped.wrapped_optimizer import WrappedOptimizer
from tw_core.checks import check_flag, check_number


@dataclass(frozen=True)
class Settings:
    """What sharing optimizers must agree on.

    Attributes:
      caller: class and name; opens messages.
      prefix: begins the names of the wrapped optimizers.
      factory: makes a wrapped optimizer.
      learning_rate: as given.
      kwargs: further arguments of the factory.
      rule: how the loss scale moves.
      master_copies: whether half-precision variables have float32 masters.
    """

    caller: str
    prefix: str
    factory: OptimizerFactory
    learning_rate: LearningRateLike
    rule: LossScale
    master_copies: bool
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def rate(self, updates: tf.Variable) -> LearningRate:
        """Returns the learning rate as a function of the count of updates."""
        return LearningRate(self.learning_rate, updates, caller=self.caller)

    def make_wrapped(self, index: int, updates: tf.Variable) -> WrappedOptimizer:
        """Makes the wrapped optimizer of one tower.

        Args:
          index: how many there are.
          updates: counts the updates made.
        """
        return make_wrapped(
            self.factory,
            name=f"{self.prefix}_opt{index}",
            learning_rate=self.rate(updates).for_optimizer(),
            kwargs=dict(self.kwargs),
            master_copies=self.master_copies,
            caller=self.caller,
        )


def check_settings(
    *,
    caller: str,
    prefix: str,
    tf_optimizer: str | OptimizerFactory,
    learning_rate: LearningRateLike,
    rule: LossScale | None,
    master_copies: bool,
    kwargs: Mapping[str, Any],
) -> Settings:
    """Checks what both classes take, and finds the optimizer's class."""
    if inspect.isclass(rule) or not isinstance(rule, LossScale | None):
        raise TypeError(
            f"{caller}: loss_scale must be a rule such as "
            f"tw_ampopt.DynamicLossScale(); got {rule!r}."
        )
    check_learning_rate(learning_rate, caller=caller)
    return Settings(
        caller,
        prefix,
        find_factory(tf_optimizer, caller=caller),
        learning_rate,
        NoOpLossScale() if rule is None else rule,
        check_flag(caller, master_copies=master_copies),
        dict(kwargs),
    )


def choose_rule(
    given: LossScale | None,
    gradual: tuple[float, float, float] | None,
    *,
    caller: str,
) -> LossScale | None:
    """Returns the one rule that is asked for, or None.

    Args:
      given: the argument ``loss_scale``.
      gradual: start and steps of a ``GradualLossScale``; None for no such rule.
      caller: opens messages.
    """
    if gradual is None:
        return given
    if given is not None:
        raise ValueError(
            f"{caller}: use_loss_scaling=True and loss_scale={given} are two rules for "
            "one scale; keep one of them."
        )
    init, increment, decrement = gradual
    check_number(caller, finite=False, loss_scaling_init=init)
    check_number(caller, at_least=0, loss_scaling_inc=increment)
    check_number(caller, at_least=0, loss_scaling_dec=decrement)
    try:
        return GradualLossScale(init, increment, decrement)
    except ValueError as error:
        raise ValueError(f"{caller}: loss_scaling_init: {error}") from error


def check_share(ours: Settings, theirs: Settings) -> None:
    """Refuses to share between optimizers of different settings."""
    names = {"factory": "tf_optimizer", "rule": "loss_scale", "kwargs": "arguments"}
    pairs = {
        key: (getattr(ours, key), getattr(theirs, key))
        for key in ("factory", "kwargs", "rule", "master_copies", "learning_rate")
    }
    different = [
        f"{names.get(key, key)} {here!r} here, {there!r} there"
        for key, (here, there) in pairs.items()
        if not (same_rate(here, there) if key == "learning_rate" else here == there)
    ]
    if different:
        raise ValueError(
            f"{ours.caller}: share takes an optimizer made with the same settings, "
            f"since both use one set of slots and one scale; got "
            f"{'; '.join(different)}."
        )

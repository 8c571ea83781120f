"""An optimizer's settings, checked once and kept as plain values.

``Settings`` are the same in all optimizers that share; ``UpdateOptions`` belong to one
optimizer alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tensorflow as tf

from tw_ampopt._checks.arguments import check_numeric_scalar
from tw_ampopt._loss_scale import GradualLossScale, LossScale, NoOpLossScale
from tw_ampopt._wrapped.factory import (
    LearningRate,
    LearningRateLike,
    OptimizerFactory,
    check_learning_rate,
    find_factory,
    same_rate,
    takes_name,
)
from tw_ampopt._wrapped.wrapped_optimizer import MasterWeights, WrappedOptimizer, wrap
from tw_core.checks import caller, check_flag, check_number
from tw_reduce.reducers import check_adds

AccumulationSteps: TypeAlias = int | tf.Tensor | tf.Variable
Reducer: TypeAlias = Callable[[Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]

_ON_NONFINITE = ("skip_group", "drop_micro_batch")


@dataclass(frozen=True)
class Settings:
    """Settings that sharing optimizers must agree on."""

    prefix: str  # of the wrapped optimizers' names
    factory: OptimizerFactory
    learning_rate: LearningRateLike
    rule: LossScale
    master_copies: bool
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def rate(self, updates: tf.Variable) -> LearningRate:
        """Returns the learning rate as a function of the count of updates."""
        return LearningRate(self.learning_rate, updates)

    def make_wrapped(self, index: int, updates: tf.Variable) -> WrappedOptimizer:
        """Makes wrapped optimizer number ``index``."""
        named = (
            {"name": f"{self.prefix}_opt{index}"} if takes_name(self.factory) else {}
        )
        rate = self.rate(updates).for_optimizer()
        try:
            optimizer = self.factory(learning_rate=rate, **named, **self.kwargs)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"{caller()}: tf_optimizer must make an optimizer when it is called "
                f"with learning_rate and {sorted(self.kwargs)}; {self.factory!r} says: "
                f"{error}"
            ) from error
        wrapped = wrap(optimizer)
        return MasterWeights(wrapped) if self.master_copies else wrapped


@dataclass(frozen=True)
class UpdateOptions:
    """Options for updates, which belong to one optimizer alone."""

    accumulation_steps: AccumulationSteps | None  # micro-batches per update
    steps_message: str  # for a tensor of steps with a bad value
    drops: bool  # a bad micro-batch is dropped, rather than its update skipped
    clip: float | None  # bound of the global norm
    reducer: Reducer | None  # None for tw_reduce.all_reduce of the devices


def check_settings(
    *,
    prefix: str,
    tf_optimizer: str | OptimizerFactory,
    learning_rate: LearningRateLike,
    rule: LossScale | None,
    master_copies: bool,
    kwargs: Mapping[str, Any],
) -> Settings:
    """Checks the arguments of both classes, and finds the optimizer's factory."""
    if inspect.isclass(rule) or not isinstance(rule, LossScale | None):
        raise TypeError(
            f"{caller()}: loss_scale must be a rule such as "
            f"tw_ampopt.DynamicLossScale(); got {rule!r}."
        )
    check_learning_rate(learning_rate)
    return Settings(
        prefix,
        find_factory(tf_optimizer),
        learning_rate,
        NoOpLossScale() if rule is None else rule,
        check_flag(master_copies=master_copies),
        dict(kwargs),
    )


def choose_rule(
    given: LossScale | None, gradual: tuple[float, float, float] | None
) -> LossScale | None:
    """Returns the requested rule, or None; refuses two rules."""
    if gradual is None:
        return given
    if given is not None:
        raise ValueError(
            f"{caller()}: use_loss_scaling=True and loss_scale={given} are two rules "
            "for one scale; keep one of them."
        )
    init, increment, decrement = gradual
    check_number(finite=False, loss_scaling_init=init)
    check_number(at_least=0, loss_scaling_inc=increment)
    check_number(at_least=0, loss_scaling_dec=decrement)
    try:
        return GradualLossScale(init, increment, decrement)
    except ValueError as error:
        raise ValueError(f"{caller()}: loss_scaling_init: {error}") from error


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
            f"{caller()}: share takes an optimizer made with the same settings, "
            f"since both use one set of slots and one scale; got "
            f"{'; '.join(different)}."
        )


def check_update_options(
    *,
    steps: Any,
    steps_name: str,
    on_nonfinite: str,
    clip_by_global_norm: float | None,
    reducer: Reducer | None,
) -> UpdateOptions:
    """Checks the options for updates."""
    if on_nonfinite not in _ON_NONFINITE:
        raise ValueError(
            f"{caller()}: on_nonfinite must be one of {list(_ON_NONFINITE)}; got "
            f"{on_nonfinite!r}."
        )
    if clip_by_global_norm is not None:
        clip_by_global_norm = check_number(
            above=0, clip_by_global_norm=clip_by_global_norm
        )
    if reducer is not None:
        check_adds(reducer=reducer)
    message = f"{caller()}: {steps_name} must be a whole number of 1 or more; got:"
    return UpdateOptions(
        accumulation_steps=_checked_steps(steps, steps_name, message),
        steps_message=message,
        drops=on_nonfinite == "drop_micro_batch",
        clip=clip_by_global_norm,
        reducer=reducer,
    )


def _checked_steps(value: Any, name: str, message: str) -> AccumulationSteps | None:
    """Returns None if nothing is to be accumulated: for None and 1."""
    if value is None:
        return None
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        check_numeric_scalar(value, name=name)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        whole = getattr(value, "item", lambda: None)()  # a NumPy number
        if isinstance(whole, bool) or not isinstance(whole, int | float):
            raise TypeError(
                f"{caller()}: {name} must be a whole number of micro-batches or a "
                f"numeric scalar tensor; got {value!r}."
            )
        value = whole
    if not (value >= 1 and float(value).is_integer()):
        raise ValueError(f"{message.removesuffix(':')} {value}.")
    return None if value == 1 else int(value)

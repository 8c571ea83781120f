"""What sharing optimizers must agree on, checked once and kept as plain values."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tw_ampopt._loss_scale.rules import GradualScale, NoScale, ScaleRule
from tw_ampopt._update.state import Scalars, SharedState
from tw_ampopt._wrapped.factory import OptimizerFactory, call_factory, find_factory
from tw_ampopt._wrapped.learning_rate import (
    LearningRate,
    LearningRateLike,
    check_learning_rate,
    same_rate,
)
from tw_ampopt._wrapped.master_weights import WithMasters
from tw_ampopt._wrapped.wrapped_optimizer import Inner, wrap
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
    rule: ScaleRule
    master_copies: bool
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def make_settings(
    *,
    caller: str,
    prefix: str,
    tf_optimizer: str | OptimizerFactory,
    learning_rate: LearningRateLike,
    rule: ScaleRule | None,
    master_copies: bool,
    kwargs: Mapping[str, Any],
) -> Settings:
    """Checks what both classes take, and finds the optimizer's class.

    Raises:
      TypeError: a rule that is none, no learning rate, no class or factory, or
        ``master_copies`` that is no bool.
      ValueError: a dotted name that leads nowhere, or a learning rate that is not
        finite.
    """
    if inspect.isclass(rule) or not isinstance(rule, ScaleRule | None):
        raise TypeError(
            f"{caller}: loss_scale is a rule such as tw_ampopt.DoublingScale(); got "
            f"{rule!r}."
        )
    check_learning_rate(learning_rate, caller=caller)
    factory = find_factory(tf_optimizer, caller=caller)
    rule = NoScale() if rule is None else rule
    return Settings(
        caller,
        prefix,
        factory,
        learning_rate,
        rule,
        check_flag(caller, master_copies=master_copies),
        dict(kwargs),
    )


def choose_rule(
    given: ScaleRule | None,
    gradual: tuple[float, float, float] | None,
    *,
    caller: str,
) -> ScaleRule | None:
    """Returns the one rule that is asked for, or None.

    Args:
      given: what ``loss_scale`` says.
      gradual: start and steps of a ``GradualScale``; None where none is wanted.
      caller: who asks; opens the message.

    Raises:
      TypeError: something that is no number.
      ValueError: two rules, or numbers out of their range.
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
        return GradualScale(init, increment, decrement)
    except ValueError as error:
        raise ValueError(f"{caller}: loss_scaling_init: {error}") from error


class Sharer(Protocol):
    """What has settings, and state by them that others may share."""

    settings: Settings
    shared: SharedState


def shared_with(share: Sharer | None, settings: Settings) -> SharedState:
    """Returns the state of ``share``, or makes one where nothing is shared.

    Raises:
      ValueError: a ``share`` of another class, learning rate, argument, rule or
        kind of copies.
    """
    if share is None:
        return SharedState(settings.rule, partial(_make_inner, settings))
    _check_share(settings, share.settings)
    return share.shared


def _make_inner(settings: Settings, index: int, scalars: Scalars) -> Inner:
    rate = LearningRate(settings.learning_rate, scalars.updates, caller=settings.caller)
    optimizer = call_factory(
        settings.factory,
        name=f"{settings.prefix}_opt{index}",
        learning_rate=rate.for_optimizer(),
        kwargs=dict(settings.kwargs),
        caller=settings.caller,
    )
    inner = wrap(optimizer, caller=settings.caller)
    return WithMasters(inner) if settings.master_copies else inner


def _check_share(settings: Settings, other: Settings) -> None:
    ours, theirs = vars(settings), vars(other)
    names = {"factory": "tf_optimizer", "rule": "loss_scale", "kwargs": "arguments"}
    different = [
        f"{names.get(key, key)} {ours[key]!r} here, {theirs[key]!r} there"
        for key in ("factory", "kwargs", "rule", "master_copies")
        if ours[key] != theirs[key]
    ]
    if not same_rate(settings.learning_rate, other.learning_rate):
        different.append(
            f"learning_rate {settings.learning_rate!r} here, {other.learning_rate!r} "
            "there"
        )
    if different:
        raise ValueError(
            f"{settings.caller}: share takes an optimizer made with the same settings, "
            f"since both use one set of slots and one scale; got "
            f"{'; '.join(different)}."
        )

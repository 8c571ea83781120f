"""An optimizer's settings, checked once and kept as plain values."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tw_ampopt._checks.arguments import check_numeric_scalar
from tw_ampopt._loss_scale import GradualLossScale, LossScale, NoOpLossScale
from tw_ampopt._wrapped.factory import (
    LearningRateLike,
    OptimizerFactory,
    check_learning_rate,
    find_factory,
    is_number,
    next_rate,
    same_rate,
    takes_name,
)
from tw_ampopt._wrapped.wrapped_optimizer import MasterWeights, WrappedOptimizer, wrap
from tw_core.internal import check_flag, check_number
from tw_reduce import StatefulReducer
from tw_reduce.reducers import check_adds

AccumulationSteps: TypeAlias = int | tf.Tensor | tf.Variable
Reducer: TypeAlias = Callable[[Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]

_ON_NONFINITE = ("skip_group", "drop_micro_batch")
# Settings that must be equal in sharing optimizers, with the arguments' names.
_SHARED = {
    "factory": "tf_optimizer",
    "kwargs": "arguments",
    "rule": "loss_scale",
    "master_copies": "master_copies",
    "learning_rate": "learning_rate",
}


@dataclass(frozen=True)
class Settings:
    """The settings of one optimizer."""

    prefix: str  # of the wrapped optimizers' names
    factory: OptimizerFactory
    kwargs: Mapping[str, Any]
    learning_rate: LearningRateLike
    rule: LossScale
    master_copies: bool
    accumulation_steps: AccumulationSteps | None  # micro-batches per update
    steps_message: str  # for a tensor of steps with an invalid value
    rereads_steps: bool  # at every micro-batch, as StyleGAN2's optimizer does
    drops: bool  # a bad micro-batch is dropped, rather than its update skipped
    clip: float | None  # bound of the global norm
    reducer: Reducer | None  # None for tw_reduce.all_reduce of the devices

    def make_wrapped(self, index: int, updates: tf.Variable) -> WrappedOptimizer:
        """Makes wrapped optimizer number ``index``; ``updates`` counts the updates."""
        name = f"{self.prefix}_opt{index}"
        named = {"name": name} if takes_name(self.factory) else {}
        rate: Any = self.learning_rate
        if not is_number(rate):  # to be called in the graph of the update
            rate = partial(next_rate, rate, updates)
        try:
            optimizer = self.factory(learning_rate=rate, **named, **self.kwargs)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                "tf_optimizer must make an optimizer when it is called with "
                f"learning_rate and {sorted(self.kwargs)}; {self.factory!r} raised: "
                f"{error}"
            ) from error
        wrapped = wrap(optimizer)
        return MasterWeights(wrapped) if self.master_copies else wrapped

    def check_share(self, other: "Settings") -> None:
        """Refuses to share with an optimizer of different settings."""
        pairs = {key: (getattr(self, key), getattr(other, key)) for key in _SHARED}
        different = [
            f"{_SHARED[key]} {here!r} here, {there!r} there"
            for key, (here, there) in pairs.items()
            if not (same_rate(here, there) if key == "learning_rate" else here == there)
        ]
        if different:
            raise ValueError(
                "share must be an optimizer with the same settings, since both use one "
                f"set of slots and one scale; got {'; '.join(different)}."
            )


def read_settings(
    prefix: str,
    *,
    tf_optimizer: str | OptimizerFactory,
    learning_rate: LearningRateLike,
    loss_scale: LossScale | None,
    master_copies: bool,
    on_nonfinite: str,
    clip_by_global_norm: float | None,
    reducer: Reducer | StatefulReducer | None,
    kwargs: Mapping[str, Any],
    **steps: Any,  # the number of micro-batches per update, by the argument's name
) -> Settings:
    """Checks the arguments of both optimizers, and finds the optimizer's factory."""
    if inspect.isclass(loss_scale) or not isinstance(loss_scale, LossScale | None):
        raise TypeError(
            "loss_scale must be a rule such as tw_ampopt.DynamicLossScale(); got "
            f"{loss_scale!r}."
        )
    if on_nonfinite not in _ON_NONFINITE:
        raise ValueError(
            f"on_nonfinite must be one of {list(_ON_NONFINITE)}; got {on_nonfinite!r}."
        )
    clip = clip_by_global_norm
    if clip is not None:
        clip = check_number(above=0, clip_by_global_norm=clip)
    check_learning_rate(learning_rate)
    ((steps_name, given),) = steps.items()
    message = f"{steps_name} must be a whole number of 1 or more; got:"
    return Settings(
        prefix,
        find_factory(tf_optimizer),
        dict(kwargs),
        learning_rate,
        NoOpLossScale() if loss_scale is None else loss_scale,
        check_flag(master_copies=master_copies),
        _checked_steps(given, steps_name, message),
        message,
        steps_name == "minibatch_multiplier",
        on_nonfinite == "drop_micro_batch",
        clip,
        None if reducer is None else check_adds(reducer=reducer),
    )


def choose_rule(
    given: LossScale | None, gradual: tuple[float, float, float] | None
) -> LossScale | None:
    """Returns the requested rule, or None; refuses two rules."""
    if gradual is None:
        return given
    if given is not None:
        raise ValueError(
            f"use_loss_scaling=True and loss_scale={given} are two rules for one "
            "scale; keep one of them."
        )
    init, increment, decrement = gradual
    check_number(finite=False, loss_scaling_init=init)
    check_number(at_least=0, loss_scaling_inc=increment)
    check_number(at_least=0, loss_scaling_dec=decrement)
    try:
        return GradualLossScale(init, increment, decrement)
    except ValueError as error:
        raise ValueError(f"loss_scaling_init: {error}") from error


def _checked_steps(value: Any, name: str, message: str) -> AccumulationSteps | None:
    """Returns None if nothing is to be accumulated: for None and 1."""
    if value is None:
        return None
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        check_numeric_scalar(value, name=name)
        return value
    whole = value.item() if isinstance(value, np.generic | np.ndarray) else value
    if isinstance(whole, bool) or not isinstance(whole, int | float):
        raise TypeError(
            f"{name} must be a whole number of micro-batches or a numeric scalar "
            f"tensor; got {value!r}."
        )
    if not (whole >= 1 and float(whole).is_integer()):
        raise ValueError(f"{message.removesuffix(':')} {whole}.")
    return None if whole == 1 else int(whole)

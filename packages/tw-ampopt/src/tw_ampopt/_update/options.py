"""How updates are made: the choices that belong to one optimizer alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from tw_ampopt._checks.arguments import check_numeric_scalar
from tw_core.checks import check_number

AccumulationSteps: TypeAlias = int | tf.Tensor | tf.Variable
Reducer: TypeAlias = Callable[[Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]

_ON_NONFINITE = ("skip_group", "drop_micro_batch")


@dataclass(frozen=True)
class UpdateOptions:
    """How updates are made.

    Attributes:
      accumulation_steps: micro-batches per update; None for no accumulation.
      steps_message: the error where ``accumulation_steps`` is a tensor with a bad
        value.
      drops: whether a bad micro-batch is dropped rather than its update skipped.
      clip: bound of the global norm, or None.
      reducer: sums over towers; None for ``tw_reduce.sum_balanced`` over the devices.
      caller: opens messages.
    """

    accumulation_steps: AccumulationSteps | None
    steps_message: str
    drops: bool
    clip: float | None
    reducer: Reducer | None
    caller: str


def check_update_options(
    *,
    caller: str,
    steps: Any,
    steps_name: str,
    on_nonfinite: str,
    clip_by_global_norm: float | None,
    reducer: Reducer | None,
) -> UpdateOptions:
    """Checks how updates are to be made.

    Args:
      steps: micro-batches per update.
      steps_name: the argument by which they were given.
      on_nonfinite: a policy by its name.
      clip_by_global_norm: bound of the norm, or None.
      reducer: sums over towers, or None.
      caller: opens messages.
    """
    if on_nonfinite not in _ON_NONFINITE:
        raise ValueError(
            f"{caller}: on_nonfinite must be one of {list(_ON_NONFINITE)}; got "
            f"{on_nonfinite!r}."
        )
    if clip_by_global_norm is not None:
        clip_by_global_norm = check_number(
            caller, above=0, clip_by_global_norm=clip_by_global_norm
        )
    if reducer is not None and not callable(reducer):
        raise TypeError(
            f"{caller}: reducer must be a function of [K][N] tensors that returns "
            f"their sums over towers, e.g. from tw_reduce; got {reducer!r}."
        )
    message = f"{caller}: {steps_name} must be a whole number of 1 or more; got:"
    return UpdateOptions(
        accumulation_steps=_checked_steps(steps, steps_name, message, caller),
        steps_message=message,
        drops=on_nonfinite == "drop_micro_batch",
        clip=clip_by_global_norm,
        reducer=reducer,
        caller=caller,
    )


def _checked_steps(
    value: Any, name: str, message: str, caller: str
) -> AccumulationSteps | None:
    """Returns None where nothing is to be accumulated: for None and 1."""
    if value is None:
        return None
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        check_numeric_scalar(value, name=name, caller=caller)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        whole = getattr(value, "item", lambda: None)()  # a NumPy number
        if isinstance(whole, bool) or not isinstance(whole, int | float):
            raise TypeError(
                f"{caller}: {name} must be a whole number of micro-batches or a "
                f"numeric scalar tensor; got {value!r}."
            )
        value = whole
    if not (value >= 1 and float(value).is_integer()):
        raise ValueError(f"{message.removesuffix(':')} {value}.")
    return None if value == 1 else int(value)

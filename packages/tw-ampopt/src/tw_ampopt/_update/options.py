"""How updates are made: the choices that belong to one optimizer alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tw_ampopt._update.multiplier import Multiplier, check_multiplier
from tw_core.checks import check_number

Reducer: TypeAlias = Callable[[Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]

_ON_NONFINITE = ("skip_group", "drop_micro_batch")


@dataclass(frozen=True)
class UpdateOptions:
    """How updates are made.

    Attributes:
      multiplier: micro-batches in a group; None for no accumulation.
      drops: whether a bad micro-batch is dropped rather than its group skipped.
      clip: bound of the global norm, or None.
      reducer: sums over towers; None for the default one.
      caller: opens messages.
    """

    multiplier: Multiplier | None
    drops: bool
    clip: float | None
    reducer: Reducer | None
    caller: str


def make_options(
    *,
    caller: str,
    minibatch_multiplier: Any,
    on_nonfinite: str,
    clip_by_global_norm: float | None,
    reducer: Reducer | None,
) -> UpdateOptions:
    """Checks how updates are to be made.

    Raises:
      ValueError: an unknown policy, a bound of the norm that is not above 0, or a
        bad multiplier.
      TypeError: a reducer that cannot be called, or a multiplier or bound that is no
        number.
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
            f"{caller}: reducer is a function of [K][N] tensors that returns their "
            f"sums over towers, e.g. from tw_reduce; got {reducer!r}."
        )
    return UpdateOptions(
        multiplier=check_multiplier(minibatch_multiplier, caller=caller),
        drops=on_nonfinite == "drop_micro_batch",
        clip=clip_by_global_norm,
        reducer=reducer,
        caller=caller,
    )

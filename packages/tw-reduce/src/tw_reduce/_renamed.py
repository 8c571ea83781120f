"""Old public names and arguments, which work for this version with a warning."""

import functools
from collections.abc import Callable
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from tw_core.checks import check_text, naming
from tw_core.renames import warn_renamed

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MOVED = {
    "plans": (
        *("AutoPlan", "BalancePlan", "Choice", "EIGHT_GPU_CROSS", "Groups"),
        *("HierarchyPlan", "PackPlan", "SplitPlan", "TensorInfo", "describe"),
        *("plan_auto", "plan_balanced", "plan_hierarchy", "plan_packs", "plan_splits"),
    ),
    "reducers": (
        *("CollectiveKeys", "Tensorlike", "TowerTensors"),
        *("check_reduced", "check_tower_tensors"),
    ),
    "tensorpack": (
        *("GradientPacker", "aggregate_grads_colocate", "allreduce_grads"),
        *("allreduce_grads_hierarchical", "allreduce_grads_naive"),
    ),
}
NAMES = {
    "spread": "tw_reduce.broadcast",
    "cast_during": "tw_reduce.compress",
    "reduce_as": "tw_reduce.accumulate_as",
    "routed": "tw_reduce.partition",
    **{n: f"tw_reduce.{home}.{n}" for home, moved in _MOVED.items() for n in moved},
}


class Elements(int):
    """A threshold in elements, where ``below_bytes`` is one in bytes."""


def converted_argument(
    old: str, new: str, convert: Callable[[Any], Any], *, stacklevel: int = 3
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function take an old keyword, of other units, as a keyword-only new one.

    The warning names the line that ``stacklevel`` says, as in ``warn_renamed``.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = function.__qualname__

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> _R:
            if old in kwargs:
                warn_renamed(
                    f"{name}({old}=...)", f"{name}({new}=...)", stacklevel=stacklevel
                )
                if new in kwargs:
                    raise TypeError(
                        f"{name}: got both {new} and {old}, its old name; pass {new}."
                    )
                kwargs[new] = convert(kwargs.pop(old))
            return function(*args, **kwargs)

        return wrapper

    return decorate


def takes_old_caller(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a check take ``caller``, the name that opens its messages."""
    name = function.__qualname__

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> _R:
        if "caller" not in kwargs:
            return function(*args, **kwargs)
        warn_renamed(f"{name}(caller=...)", "tw_core.checks.naming(...) around it")
        with naming(check_text(name, caller=kwargs.pop("caller"))):
            return function(*args, **kwargs)

    return wrapper


def _as_elements(below: Any) -> Any:
    is_number = isinstance(below, Integral) and not isinstance(below, bool)
    return Elements(below) if is_number else below


takes_old_below = converted_argument("below", "below_bytes", _as_elements)
"""Makes a function take the older ``below``, in elements."""

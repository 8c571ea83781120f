"""Old public names and arguments, which still work in this version, with a warning."""

from numbers import Integral
from typing import Any

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
    """A threshold in elements, whereas ``below_bytes`` is in bytes."""


def _as_elements(below: Any) -> Any:
    is_number = isinstance(below, Integral) and not isinstance(below, bool)
    return Elements(below) if is_number else below


def _as_bound(seconds: float) -> float | None:
    return seconds or None


# Old argument -> the new one, and the function that converts its value.
PACKING = {"below": ("below_bytes", _as_elements)}
WAITING = {"timeout_seconds": ("timeout_s", _as_bound)}

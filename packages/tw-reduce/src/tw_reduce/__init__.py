"""Reducers: callables that give every tower the sum over all towers' gradients.

Importing this package does not import TensorFlow; each name is loaded when it
is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tw_reduce._aggregate_grads_colocate import aggregate_grads_colocate
    from tw_reduce._allreduce_grads import (
        allreduce_grads,
        allreduce_grads_hierarchical,
        allreduce_grads_naive,
    )
    from tw_reduce._auto import auto
    from tw_reduce._auto_plan import AutoPlan, Choice, plan_auto
    from tw_reduce._cast_during import cast_during, reduce_as
    from tw_reduce._collective import sum_collective
    from tw_reduce._collective_keys import CollectiveKeys
    from tw_reduce._gradient_packer import GradientPacker, SplitPlan, plan_splits
    from tw_reduce._hierarchical import (
        EIGHT_GPU_CROSS,
        Groups,
        HierarchyPlan,
        hierarchical,
        plan_hierarchy,
    )
    from tw_reduce._mean import mean
    from tw_reduce._modes import reducer_for_mode
    from tw_reduce._nccl import sum_nccl
    from tw_reduce._packed import PackPlan, packed, plan_packs
    from tw_reduce._routed import routed
    from tw_reduce._spread import spread
    from tw_reduce._sum_balanced import BalancePlan, plan_balanced, sum_balanced
    from tw_reduce._sum_on_device import sum_on_device
    from tw_reduce._sum_round_robin import sum_round_robin
    from tw_reduce._tensor_info import TensorInfo, describe
    from tw_reduce._tower_tensors import (
        Reducer,
        Tensorlike,
        TowerTensors,
        check_reduced,
        check_tower_tensors,
    )

__all__ = [
    "AutoPlan",
    "BalancePlan",
    "Choice",
    "CollectiveKeys",
    "EIGHT_GPU_CROSS",
    "GradientPacker",
    "Groups",
    "HierarchyPlan",
    "PackPlan",
    "Reducer",
    "SplitPlan",
    "TensorInfo",
    "Tensorlike",
    "TowerTensors",
    "aggregate_grads_colocate",
    "allreduce_grads",
    "allreduce_grads_hierarchical",
    "allreduce_grads_naive",
    "auto",
    "cast_during",
    "check_reduced",
    "check_tower_tensors",
    "describe",
    "hierarchical",
    "mean",
    "packed",
    "plan_auto",
    "plan_balanced",
    "plan_hierarchy",
    "plan_packs",
    "plan_splits",
    "reduce_as",
    "reducer_for_mode",
    "routed",
    "spread",
    "sum_balanced",
    "sum_collective",
    "sum_nccl",
    "sum_on_device",
    "sum_round_robin",
]

_HOMES = {
    "_aggregate_grads_colocate": ["aggregate_grads_colocate"],
    "_allreduce_grads": [
        "allreduce_grads",
        "allreduce_grads_hierarchical",
        "allreduce_grads_naive",
    ],
    "_auto": ["auto"],
    "_auto_plan": ["AutoPlan", "Choice", "plan_auto"],
    "_cast_during": ["cast_during", "reduce_as"],
    "_collective": ["sum_collective"],
    "_collective_keys": ["CollectiveKeys"],
    "_gradient_packer": ["GradientPacker", "SplitPlan", "plan_splits"],
    "_hierarchical": [
        "EIGHT_GPU_CROSS",
        "Groups",
        "HierarchyPlan",
        "hierarchical",
        "plan_hierarchy",
    ],
    "_mean": ["mean"],
    "_modes": ["reducer_for_mode"],
    "_nccl": ["sum_nccl"],
    "_packed": ["PackPlan", "packed", "plan_packs"],
    "_routed": ["routed"],
    "_spread": ["spread"],
    "_sum_balanced": ["BalancePlan", "plan_balanced", "sum_balanced"],
    "_sum_on_device": ["sum_on_device"],
    "_sum_round_robin": ["sum_round_robin"],
    "_tensor_info": ["TensorInfo", "describe"],
    "_tower_tensors": [
        "Reducer",
        "Tensorlike",
        "TowerTensors",
        "check_reduced",
        "check_tower_tensors",
    ],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

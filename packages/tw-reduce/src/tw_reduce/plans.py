"""The reducers' decisions as data, and the pure functions that make them.

The planners take no tensors: ``describe`` extracts the facts that they need.
"""

from tw_core.internal import PackPlan
from tw_reduce._combinators.packed import plan_packs
from tw_reduce._measured import (
    Measured,
    MeasuredProfile,
    Measurements,
    Strategy,
    read_measurements,
)
from tw_reduce._planning import AutoPlan, Choice, plan_auto
from tw_reduce._sums.hierarchical import (
    EIGHT_GPU_CROSS,
    Groups,
    HierarchyPlan,
    plan_hierarchy,
)
from tw_reduce._sums.one_device import BalancePlan, plan_balanced
from tw_reduce._tensor_info import TensorInfo, describe
from tw_reduce.tensorpack._gradient_packer import SplitPlan, plan_splits

__all__ = [
    "AutoPlan",
    "BalancePlan",
    "Choice",
    "EIGHT_GPU_CROSS",
    "Groups",
    "HierarchyPlan",
    "Measured",
    "MeasuredProfile",
    "Measurements",
    "PackPlan",
    "SplitPlan",
    "Strategy",
    "TensorInfo",
    "describe",
    "plan_auto",
    "plan_balanced",
    "plan_hierarchy",
    "plan_packs",
    "plan_splits",
    "read_measurements",
]

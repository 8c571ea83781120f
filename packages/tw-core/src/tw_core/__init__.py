"""Towers: one copy of a model per device, and what every part of it shares.

Importing this package does not import TensorFlow; each name is loaded when it
is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tw_core._autograph import without_autograph
    from tw_core._base_tower_context import BaseTowerContext
    from tw_core._copy_to_replicas import copy_to_replicas
    from tw_core._current_tower import get_current_tower_context
    from tw_core._device_names import canonical_device
    from tw_core._devices import (
        available_devices,
        check_devices,
        check_known_devices,
        use_logical_cpus,
    )
    from tw_core._duplicate_rows import sum_duplicate_rows
    from tw_core._grad_list_checks import (
        check_grad_list,
        check_replicated_grad_list,
        check_shared_grad_list,
    )
    from tw_core._grad_lists import (
        Gradient,
        GradList,
        merge_grad_list,
        split_grad_list,
    )
    from tw_core._gradient_shapes import ensure_gradient_shapes
    from tw_core._least_loaded import LeastLoadedDeviceSetter
    from tw_core._local_variables import override_to_local_variable
    from tw_core._mode import (
        builds_session_graph,
        compiles_with_xla,
        orders_effects,
        traces_function,
    )
    from tw_core._optimizer_like import OptimizerLike
    from tw_core._placement import Placement, Transfer, placement
    from tw_core._replica_device_setter import LeastLoadedTask, replica_device_setter
    from tw_core._replicate import replicate
    from tw_core._session_config import session_config
    from tw_core._tower import Tower, map_towers, towers
    from tw_core._tower_collections import freeze_collections, leave_no_summaries
    from tw_core._tower_context import (
        PredictTowerContext,
        TowerContext,
        TrainTowerContext,
    )
    from tw_core._tower_func import TowerFunc
    from tw_core._tower_handles import TowerHandle, TowerHandles
    from tw_core._tower_variables import (
        VariableOrigin,
        record_variables,
        tower_build,
        variable_origin,
    )
    from tw_core._variable_policies import Replicated, Shared
    from tw_core._variable_store import VariableStore

__all__ = [
    "BaseTowerContext",
    "GradList",
    "Gradient",
    "LeastLoadedDeviceSetter",
    "LeastLoadedTask",
    "OptimizerLike",
    "Placement",
    "PredictTowerContext",
    "Replicated",
    "Shared",
    "Tower",
    "TowerContext",
    "TowerFunc",
    "TowerHandle",
    "TowerHandles",
    "TrainTowerContext",
    "Transfer",
    "VariableOrigin",
    "VariableStore",
    "available_devices",
    "builds_session_graph",
    "canonical_device",
    "check_devices",
    "check_grad_list",
    "check_known_devices",
    "check_replicated_grad_list",
    "check_shared_grad_list",
    "compiles_with_xla",
    "copy_to_replicas",
    "ensure_gradient_shapes",
    "freeze_collections",
    "get_current_tower_context",
    "leave_no_summaries",
    "map_towers",
    "merge_grad_list",
    "orders_effects",
    "override_to_local_variable",
    "placement",
    "record_variables",
    "replica_device_setter",
    "replicate",
    "session_config",
    "split_grad_list",
    "sum_duplicate_rows",
    "tower_build",
    "towers",
    "traces_function",
    "use_logical_cpus",
    "variable_origin",
    "without_autograph",
]

_HOMES = {
    "_autograph": ["without_autograph"],
    "_base_tower_context": ["BaseTowerContext"],
    "_copy_to_replicas": ["copy_to_replicas"],
    "_current_tower": ["get_current_tower_context"],
    "_device_names": ["canonical_device"],
    "_devices": [
        "available_devices",
        "check_devices",
        "check_known_devices",
        "use_logical_cpus",
    ],
    "_duplicate_rows": ["sum_duplicate_rows"],
    "_grad_list_checks": [
        "check_grad_list",
        "check_replicated_grad_list",
        "check_shared_grad_list",
    ],
    "_grad_lists": ["GradList", "Gradient", "merge_grad_list", "split_grad_list"],
    "_gradient_shapes": ["ensure_gradient_shapes"],
    "_least_loaded": ["LeastLoadedDeviceSetter"],
    "_local_variables": ["override_to_local_variable"],
    "_mode": [
        "builds_session_graph",
        "compiles_with_xla",
        "orders_effects",
        "traces_function",
    ],
    "_optimizer_like": ["OptimizerLike"],
    "_placement": ["Placement", "Transfer", "placement"],
    "_replica_device_setter": ["LeastLoadedTask", "replica_device_setter"],
    "_replicate": ["replicate"],
    "_session_config": ["session_config"],
    "_tower": ["Tower", "map_towers", "towers"],
    "_tower_collections": ["freeze_collections", "leave_no_summaries"],
    "_tower_context": ["PredictTowerContext", "TowerContext", "TrainTowerContext"],
    "_tower_func": ["TowerFunc"],
    "_tower_handles": ["TowerHandle", "TowerHandles"],
    "_tower_variables": [
        "VariableOrigin",
        "record_variables",
        "tower_build",
        "variable_origin",
    ],
    "_variable_policies": ["Replicated", "Shared"],
    "_variable_store": ["VariableStore"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Batches loaded onto devices once and trained on many times.

Importing this package does not import TensorFlow; each name is loaded when it
is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tw_rlload._device_batch import DeviceBatch
    from tw_rlload._epoch_function import EpochFunction
    from tw_rlload._epoch_order import EpochOrder, epoch_order
    from tw_rlload._epoch_result import EpochResult
    from tw_rlload._load_plan import LoadPlan, plan_load
    from tw_rlload._load_report import LoadReport
    from tw_rlload._local_sync_parallel_optimizer import LocalSyncParallelOptimizer
    from tw_rlload._weighted_mean import weighted_mean

__all__ = [
    "DeviceBatch",
    "EpochFunction",
    "EpochOrder",
    "EpochResult",
    "LoadPlan",
    "LoadReport",
    "LocalSyncParallelOptimizer",
    "epoch_order",
    "plan_load",
    "weighted_mean",
]

_HOMES = {
    "_device_batch": ["DeviceBatch"],
    "_epoch_function": ["EpochFunction"],
    "_epoch_order": ["EpochOrder", "epoch_order"],
    "_epoch_result": ["EpochResult"],
    "_load_plan": ["LoadPlan", "plan_load"],
    "_load_report": ["LoadReport"],
    "_local_sync_parallel_optimizer": ["LocalSyncParallelOptimizer"],
    "_weighted_mean": ["weighted_mean"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Builders: parameter server, replicated and asynchronous training over towers.

Importing this package does not import TensorFlow; each name is loaded when it
is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tw_builders._apply import apply_gradients, apply_shared_gradients
    from tw_builders._async import AsyncMultiGPUBuilder
    from tw_builders._async_runner import AsyncRunner, TowerError, locked_step
    from tw_builders._data_parallel import DataParallelBuilder
    from tw_builders._optimizers import make_optimizers
    from tw_builders._parameter_server import SyncMultiGPUParameterServerBuilder
    from tw_builders._replicated import SyncMultiGPUReplicatedBuilder
    from tw_builders._sync_variables import SyncVariablesHook

__all__ = [
    "AsyncMultiGPUBuilder",
    "AsyncRunner",
    "DataParallelBuilder",
    "SyncMultiGPUParameterServerBuilder",
    "SyncMultiGPUReplicatedBuilder",
    "SyncVariablesHook",
    "TowerError",
    "apply_gradients",
    "apply_shared_gradients",
    "locked_step",
    "make_optimizers",
]

_HOMES = {
    "_apply": ["apply_gradients", "apply_shared_gradients"],
    "_async": ["AsyncMultiGPUBuilder"],
    "_async_runner": ["AsyncRunner", "TowerError", "locked_step"],
    "_data_parallel": ["DataParallelBuilder"],
    "_optimizers": ["make_optimizers"],
    "_parameter_server": ["SyncMultiGPUParameterServerBuilder"],
    "_replicated": ["SyncMultiGPUReplicatedBuilder"],
    "_sync_variables": ["SyncVariablesHook"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

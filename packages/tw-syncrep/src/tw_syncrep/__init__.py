"""Synchronous replicas over a cluster, in graph mode, with waits that end.

Importing this package does not import TensorFlow; each name is loaded when it is
first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tw_syncrep import cluster
    from tw_syncrep._bounded_session import TrainingSession
    from tw_syncrep._errors import (
        ChiefLostError,
        ReplicaTimeoutError,
        ServerLostError,
        StartTimeoutError,
        SyncTimeoutError,
    )
    from tw_syncrep._hook import SyncReplicasHook
    from tw_syncrep._optimizer import SyncReplicasOptimizer
    from tw_syncrep._status import Status
    from tw_syncrep._training_session import training_session

__all__ = [
    "ChiefLostError",
    "ReplicaTimeoutError",
    "ServerLostError",
    "StartTimeoutError",
    "Status",
    "SyncReplicasHook",
    "SyncReplicasOptimizer",
    "SyncTimeoutError",
    "TrainingSession",
    "cluster",
    "training_session",
]

_HOMES = {
    "_bounded_session": ["TrainingSession"],
    "_errors": [
        "ChiefLostError",
        "ReplicaTimeoutError",
        "ServerLostError",
        "StartTimeoutError",
        "SyncTimeoutError",
    ],
    "_hook": ["SyncReplicasHook"],
    "_optimizer": ["SyncReplicasOptimizer"],
    "_status": ["Status"],
    "_training_session": ["training_session"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "cluster":
        return import_module(f"{__name__}.cluster")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""An optimizer with loss scaling and gradient accumulation over towers.

Importing this package does not import TensorFlow; each name is loaded when it
is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tw_ampopt._optimizer import Optimizer
    from tw_ampopt._scale_rules import (
        DoublingScale,
        GradualScale,
        NoScale,
        ScaleRule,
        StaticScale,
    )
    from tw_ampopt._simple_adam import SimpleAdam
    from tw_ampopt._statistics_hook import StatisticsHook
    from tw_ampopt._statistics_writer import StatisticsWriter
    from tw_ampopt._tower_optimizer import TowerOptimizer

__all__ = [
    "DoublingScale",
    "GradualScale",
    "NoScale",
    "Optimizer",
    "ScaleRule",
    "SimpleAdam",
    "StaticScale",
    "StatisticsHook",
    "StatisticsWriter",
    "TowerOptimizer",
]

_HOMES = {
    "_optimizer": ["Optimizer"],
    "_scale_rules": [
        "DoublingScale",
        "GradualScale",
        "NoScale",
        "ScaleRule",
        "StaticScale",
    ],
    "_simple_adam": ["SimpleAdam"],
    "_statistics_hook": ["StatisticsHook"],
    "_statistics_writer": ["StatisticsWriter"],
    "_tower_optimizer": ["TowerOptimizer"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

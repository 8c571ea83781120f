"""Old names and arguments of tw-core that work for this version, with a warning.

Until 0.1 all public names were at the top of the package.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from tw_core.checks import naming
from tw_core.renames import warn_renamed

_P = ParamSpec("_P")
_R = TypeVar("_R")

_HOMES = {
    "tw_core.contexts": (
        *("BaseTowerContext", "PredictTowerContext", "TowerFunc", "TowerHandle"),
        "TowerHandles",
    ),
    "tw_core.devices": (
        *("LeastLoadedTask", "Placement", "Transfer", "available_devices"),
        *("canonical_device", "check_devices"),
    ),
    "tw_core.gradients": ("GradList", "Gradient", "check_grad_list"),
    "tw_core.modes": ("without_autograph",),
    "tw_core.optimizers": ("OptimizerLike",),
    "tw_core.variables": ("override_to_local_variable",),
}

# Old name of this package -> where it is.
NAMES = {name: f"{home}.{name}" for home, names in _HOMES.items() for name in names}


def takes_caller(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Has a check take its old argument ``caller``; below ``without_autograph``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> _R:
        caller = kwargs.pop("caller", None)
        if caller is None:
            return function(*args, **kwargs)
        old = f"{function.__name__}(caller=...)"
        # One frame more than usual is that of without_autograph.
        warn_renamed(old, "with tw_core.checks.naming(...)", stacklevel=4)
        with naming(caller):
            return function(*args, **kwargs)

    return wrapper

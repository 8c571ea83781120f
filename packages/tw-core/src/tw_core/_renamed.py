"""Old names of tw-core that work for this version, with a warning.

Until 0.1 all public names were at the top of the package.
"""

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

# Old name in this package -> its present location.
NAMES = {name: f"{home}.{name}" for home, names in _HOMES.items() for name in names}

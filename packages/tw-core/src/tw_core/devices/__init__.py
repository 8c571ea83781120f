"""Devices: naming and checking them, placing variables, and reading a placement."""

from tw_core.devices._least_loaded import LeastLoadedDeviceSetter
from tw_core.devices._logical import (
    available_devices,
    canonical_device,
    check_devices,
    session_config,
    use_logical_cpus,
)
from tw_core.devices._placement import Placement, Transfer, placement
from tw_core.devices._replica_device_setter import (
    LeastLoadedTask,
    replica_device_setter,
)

__all__ = [
    "LeastLoadedDeviceSetter",
    "LeastLoadedTask",
    "Placement",
    "Transfer",
    "available_devices",
    "canonical_device",
    "check_devices",
    "placement",
    "replica_device_setter",
    "session_config",
    "use_logical_cpus",
]

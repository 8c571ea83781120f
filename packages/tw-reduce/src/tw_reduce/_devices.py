"""Refusing devices to add on: none, not a string, unknown, or shared."""

from collections.abc import Sequence

from tw_core.checks import naming
from tw_core.devices import check_known_devices, repeated_devices


def check_devices(
    devices: Sequence[str], *, caller: str, num_towers: int | None = None
) -> None:
    """Refuses an empty list and, where devices can be known, unknown ones.

    In a graph only a session knows its devices; without a default session they
    are not checked there. With ``num_towers`` there must be as many.
    """
    check_device_strings(devices, caller=caller)
    with naming(caller):
        check_known_devices(devices)
    if num_towers is not None and len(devices) != num_towers:
        raise ValueError(
            f"{caller}: devices must hold one device per tower; got {len(devices)} for "
            f"{num_towers} towers. Pass the towers' devices, tower 0 first."
        )


def check_device_strings(devices: Sequence[str], *, caller: str) -> None:
    """Refuses an empty list, and anything but a list of strings."""
    listed = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not listed or not all(isinstance(device, str) for device in devices):
        raise TypeError(
            f"{caller}: devices must be a list of device strings; got {devices!r}. "
            "Write e.g. ['/cpu:0']."
        )
    if not devices:
        raise ValueError(f"{caller}: devices is empty; pass e.g. ['/cpu:0'].")


def check_distinct(devices: Sequence[str], *, caller: str) -> None:
    """Refuses two towers on one device, where devices talk to each other."""
    shared = repeated_devices(devices)
    if shared:
        raise ValueError(
            f"{caller}: every tower needs a device of its own; several are on "
            f"{shared}. Use sum_balanced, which adds wherever the towers are."
        )

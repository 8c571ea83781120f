"""Refusing devices that cannot add: none, not a string, or not there."""

from collections import Counter
from collections.abc import Sequence

import tensorflow as tf

import tw_core


def check_reduce_devices(devices: Sequence[str], *, caller: str) -> None:
    """Refuses an empty list and, where it can be known, unknown devices.

    In a graph only a session knows its devices; without a default session they
    are not checked there.

    Args:
      devices: where a reducer shall work.
      caller: who refuses; opens the message.

    Raises:
      ValueError: no device, or an unknown one.
      TypeError: ``devices`` is one string, or holds something else.
    """
    check_device_strings(devices, caller=caller)
    tw_core.check_known_devices(devices, caller=caller)


def check_device_strings(devices: Sequence[str], *, caller: str) -> None:
    """Refuses an empty list, and what is no list of strings."""
    listed = isinstance(devices, Sequence) and not isinstance(devices, str)
    if not listed or not all(isinstance(device, str) for device in devices):
        raise TypeError(
            f"{caller}: devices must be a list of device strings; got {devices!r}. "
            "Write e.g. ['/cpu:0']."
        )
    if not devices:
        raise ValueError(f"{caller}: devices is empty; pass e.g. ['/cpu:0'].")


def check_one_device_per_tower(
    devices: Sequence[str], num_towers: int, *, caller: str
) -> None:
    """Refuses another number of devices than towers; else as above."""
    check_reduce_devices(devices, caller=caller)
    if len(devices) != num_towers:
        raise ValueError(
            f"{caller}: devices must hold one device a tower; got {len(devices)} for "
            f"{num_towers} towers. Pass the towers' devices, tower 0 first."
        )


def check_distinct(devices: Sequence[str], *, caller: str) -> None:
    """Refuses two towers on one device, where devices talk to each other."""
    counts = Counter(tw_core.canonical_device(device) for device in devices)
    shared = sorted(device for device, count in counts.items() if count > 1)
    if shared:
        raise ValueError(
            f"{caller}: every tower needs a device of its own; several are on "
            f"{shared}. Use sum_balanced, which adds wherever the towers are."
        )


def host_of(device: str | None) -> str:
    """Names the first CPU of the task that a device belongs to.

    >>> host_of("/job:worker/task:1/gpu:3")
    '/job:worker/task:1/device:CPU:0'
    """
    spec = tf.DeviceSpec.from_string(device or "")
    return str(spec.replace(device_type="CPU", device_index=0).to_string())

"""Device strings: reading them, and spelling each device one way.

TensorFlow takes ``"gpu:0"``, ``"/gpu:0"``, ``"/device:GPU:0"`` and, for a device
of this process, the same with ``/job:localhost/replica:0/task:0`` before it; ops
and variables answer in any of these.
"""

from collections import Counter
from collections.abc import Iterable

import tensorflow as tf

from tw_core.checks import named_caller


def parse_device(device: str, *, caller: str) -> tf.DeviceSpec:
    """Reads a device string.

    Args:
      device: any spelling TensorFlow takes.
      caller: who asks; opens the message.

    Raises:
      ValueError: no string, TensorFlow cannot read it, or the device's number is
        negative.
    """
    if not isinstance(device, str):
        raise ValueError(_no_device(device, caller))
    try:
        spec = tf.DeviceSpec.from_string(device)
        negative = spec.device_index is not None and spec.device_index < 0
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(_no_device(device, caller)) from error
    if negative:
        raise ValueError(_no_device(device, caller))
    return spec


def canonical_device(device: str) -> str:
    """Spells a device one way, so that two strings can be compared.

    Args:
      device: any spelling TensorFlow takes, such as ``"/gpu:0"``,
        ``"GPU:0"`` or ``"/job:localhost/replica:0/task:0/device:GPU:0"``.

    Returns:
      ``"/device:GPU:0"`` for a device of this process; with job, replica and
      task kept for any other; ``""`` for no device.

    Raises:
      ValueError: TensorFlow cannot read the string.

    >>> canonical_device("/job:localhost/replica:0/task:0/cpu:1")
    '/device:CPU:1'
    >>> canonical_device("/job:ps/task:1/cpu:0")
    '/job:ps/task:1/device:CPU:0'
    """
    return _canonical(device, named_caller("canonical_device"))


def _canonical(device: str, caller: str) -> str:
    spec = parse_device(device, caller=caller)
    if _is_of_this_process(spec):
        spec = tf.DeviceSpec(
            device_type=spec.device_type, device_index=spec.device_index
        )
    return str(spec.to_string())


def host_of(device: str | None) -> str:
    """Names the first CPU of the task that a device belongs to.

    Args:
      device: any spelling TensorFlow takes; ``""`` or None for no device.

    >>> host_of("/job:worker/task:1/gpu:3")
    '/job:worker/task:1/device:CPU:0'
    >>> host_of("")
    '/device:CPU:0'
    """
    spec = parse_device(device or "", caller="host_of")
    return str(spec.replace(device_type="CPU", device_index=0).to_string())


def repeated_devices(devices: Iterable[str]) -> list[str]:
    """Returns the devices that occur more than once, spelt canonically and sorted.

    >>> repeated_devices(["/gpu:1", "/cpu:0", "/device:GPU:1"])
    ['/device:GPU:1']
    """
    counts = Counter(_canonical(device, "repeated_devices") for device in devices)
    return sorted(device for device, count in counts.items() if count > 1)


def _is_of_this_process(spec: tf.DeviceSpec) -> bool:
    return (
        spec.job in (None, "localhost")
        and spec.replica in (None, 0)
        and spec.task in (None, 0)
    )


def _no_device(device: object, caller: str) -> str:
    return (
        f"{caller}: {device!r} is not a TensorFlow device string; write e.g. '/gpu:0', "
        "'/cpu:1' or '/job:worker/task:0/gpu:0'."
    )

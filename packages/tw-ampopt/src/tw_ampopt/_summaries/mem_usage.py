"""Memory in use on a device, where the device can tell."""

from collections.abc import Sequence

import tensorflow as tf

from tw_core import canonical_device

MEMORY = "mem_usage_gb"  # the older system's name

_GIB = 2.0**30


def mem_usage(devices: Sequence[str]) -> dict[str, float]:
    """Asks TensorFlow's allocator of the first device, as the original did.

    Asking starts TensorFlow's eager context: do it once a session runs, whose own
    memory settings then hold.

    Args:
      devices: device strings.

    Returns:
      ``mem_usage_gb``: GiB in use by this process; empty where the device does not
      count.
    """
    spec = tf.DeviceSpec.from_string(canonical_device(devices[0]))
    if spec.device_type is None:
        return {}
    name = f"{spec.device_type}:{spec.device_index or 0}"
    try:
        info = tf.config.experimental.get_memory_info(name)
    except ValueError:  # a device that keeps no count
        return {}
    return {MEMORY: float(info["current"]) / _GIB}

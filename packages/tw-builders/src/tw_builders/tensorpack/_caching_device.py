"""Reading each large variable once per step, on the least loaded of several devices.

Source of the idea: tf_cnn_benchmarks' ``OverrideCachingDevice``, which tensorpack
0.11 adopted (``tensorpack/graph_builder/utils.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core.checks import check_function, check_list, check_whole_number, public
from tw_core.devices import canonical_device


class OverrideCachingDevice:
    """A variable getter that gives every trainable variable a caching device.

    For ``tf.compat.v1.variable_scope(..., custom_getter=...)`` in a session graph.
    All uses of a cached variable then share one read, so that a step transfers its
    value at most once to each device. TensorFlow reads a resource variable on its own
    device, whatever the caching device is.

    A variable that is not trainable, or whose shape is not fully known, is made as
    it would be without this getter. (tensorpack made it local, so that the moving
    averages of batch normalisation were missing from checkpoints.)

    Attributes:
      devices: where large variables are cached.
      sizes: elements of large variables cached on each of ``devices``.
      device_for_small_variables: where small variables are cached.
      small_variable_size_threshold: number of elements from which a variable is
        large.
    """

    @public
    def __init__(
        self,
        devices: Sequence[str],
        device_for_small_variables: str,
        small_variable_size_threshold: int,
    ) -> None:
        """Starts with nothing cached on any device.

        Args:
          devices: device strings, at least one.
          device_for_small_variables: device string.
          small_variable_size_threshold: number of elements, 0 or more.

        Raises:
          ValueError: no ``devices``, a negative threshold, or a string TensorFlow
            cannot read.
          TypeError: an argument of another type.
        """
        check_list(devices=devices, of="devices")
        check_whole_number(
            at_least=0,
            small_variable_size_threshold=small_variable_size_threshold,
        )
        _check_devices([*devices, device_for_small_variables])
        self.devices = list(devices)
        self.sizes = [0] * len(self.devices)
        self.device_for_small_variables = device_for_small_variables
        self.small_variable_size_threshold = int(small_variable_size_threshold)

    @public
    def __call__(
        self, getter: Callable[..., tf.Variable], *args: Any, **kwargs: Any
    ) -> tf.Variable:
        """Makes a variable with a caching device.

        Args:
          getter: the next getter, which makes the variable.
          *args: for ``getter``.
          **kwargs: for ``getter``; with ``shape``, and with ``trainable`` unless
            it is True.

        Returns:
          The result of ``getter``.

        Raises:
          TypeError: ``getter`` cannot be called.
        """
        check_function(getter=getter)
        count = tf.TensorShape(kwargs.get("shape")).num_elements()
        if count is None or kwargs.get("trainable") is False:
            return getter(*args, **kwargs)
        kwargs["caching_device"] = self._device_for(count)
        return getter(*args, **kwargs)

    def _device_for(self, count: int) -> str:
        if count < self.small_variable_size_threshold:
            return self.device_for_small_variables
        least = self.sizes.index(min(self.sizes))
        self.sizes[least] += count
        return self.devices[least]


def _check_devices(devices: Sequence[Any]) -> None:
    unreadable = [device for device in devices if not _is_device(device)]
    if unreadable:
        raise ValueError(
            f"OverrideCachingDevice: {unreadable} are not TensorFlow device strings; "
            "write e.g. '/gpu:0' or '/cpu:0'."
        )


def _is_device(device: Any) -> bool:
    try:
        return isinstance(device, str) and canonical_device(device) is not None
    except ValueError:
        return False

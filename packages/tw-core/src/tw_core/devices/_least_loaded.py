"""Places each variable on the device with the fewest bytes of variables so far.

A variable is a ``VarHandleOp``, whose output has shape ``()``, so its size is
read from its attributes. Ops that use a variable run on its device.

TensorFlow first calls the device function for a variable and then, if the variable is
colocated with another, as an optimizer's slots are, moves it to the other's device. So
each variable is counted where it ended up, when the next one is placed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core._checks import check_function
from tw_core._variable_kinds import (
    check_operation,
    device_of_variable,
    refuse_reference_op,
)
from tw_core.devices._logical import canonical_device, parse_device

_log = logging.getLogger("tw_core")


class LeastLoadedDeviceSetter:
    """Puts each variable on the device with the fewest bytes so far.

    For ``tf.compat.v1.device`` in a session graph. As a variable creator (see
    ``create``) it also places the variables of a ``tf.Module`` or Keras model.
    Source of the idea: tensorpack's class of this name, which counted elements.

    Attributes:
      worker_device: where everything but variables goes.
      ps_devices: where variables go.
    """

    def __init__(self, worker_device: str, ps_devices: Sequence[str]) -> None:
        """Starts with nothing on any device.

        Args:
          worker_device: device string; ``""`` leaves other ops where they are.
          ps_devices: device strings, at least one.

        Raises:
          ValueError: no ``ps_devices``, or a string TensorFlow cannot read.
        """
        is_list = isinstance(ps_devices, Sequence) and not isinstance(ps_devices, str)
        if not is_list or not ps_devices:
            raise ValueError(
                "LeastLoadedDeviceSetter: ps_devices must be a list of at least one "
                f"device; got {ps_devices!r}. Pass e.g. ['/gpu:0', '/gpu:1']."
            )
        for device in (worker_device, *ps_devices):
            parse_device(device)
        self.worker_device = canonical_device(worker_device)
        self.ps_devices = [canonical_device(device) for device in ps_devices]
        self._loads = ByteLoads(len(ps_devices), self._place_of)

    @property
    def bytes_on(self) -> list[int]:
        """Bytes of variables on each of ``ps_devices``, pinned ones included."""
        return self._loads.bytes

    @property
    def ps_sizes(self) -> list[int]:
        """The same as ``bytes_on``, under tensorpack's name, which counted elements."""
        return self.bytes_on

    def place_with_balance(self, op: tf.Operation) -> str:
        """Chooses the least loaded device for something as large as ``op``.

        Also a tensorpack name. For tensors that are not variables, such as the sum
        of a variable's gradients; variables are placed by calling the setter.

        Args:
          op: a variable's op, or another one, whose first output counts.

        Returns:
          One of ``ps_devices``, whose bytes then include those of ``op``.

        Raises:
          ValueError: ``op`` is a reference variable.
          TypeError: ``op`` is not an operation, or has no outputs.
        """
        if not isinstance(op, tf.Operation) or not op.outputs:
            raise TypeError(
                f"op must be an operation with an output; got {op!r}. Pass e.g. "
                "variable.op."
            )
        refuse_reference_op(op)
        device = self._least_loaded()
        self._loads.add(device, _bytes_of_op(op))
        return device

    def __call__(self, op: tf.Operation) -> str:
        """Returns the device of ``op``; an op that has one keeps it.

        Raises:
          TypeError, ValueError: ``op`` is not an operation, or is a reference variable.
        """
        check_operation(op)
        refuse_reference_op(op)
        is_variable = op.type == "VarHandleOp"
        device = str(op.device)
        if not device:
            device = self._least_loaded() if is_variable else device_of_variable(op)
            device = device or ("" if is_variable else self.worker_device)
        if is_variable:
            self._loads.note(op)
        return device

    def create(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        """Makes a variable on the least loaded device.

        For ``with tf.variable_creator_scope(setter.create): model = Model()``,
        outside of session graphs.
        """
        check_function(next_creator=next_creator)
        with tf.device(self._least_loaded()):
            variable = next_creator(**kwargs)
        num_bytes = bytes_of(variable.name, variable.shape, variable.dtype)
        self._loads.add(variable.device, num_bytes)
        return variable

    def __str__(self) -> str:
        """Shows the worker's device."""
        return f"LeastLoadedDeviceSetter-{self.worker_device}"

    def _least_loaded(self) -> str:
        return self.ps_devices[self._loads.least()]

    def _place_of(self, device: str) -> int | None:
        name = canonical_device(device)
        return self.ps_devices.index(name) if name in self.ps_devices else None


class ByteLoads:
    """Counts the bytes of variables at each of several places: devices or tasks."""

    def __init__(self, places: int, place_of: Callable[[str], int | None]) -> None:
        """Starts empty; ``place_of`` maps a device to its place, or to None."""
        self._bytes = [0] * places
        self._place_of = place_of
        self._last: tuple[tf.Operation, int] | None = None

    @property
    def bytes(self) -> list[int]:
        """Bytes at each place."""
        self._count_last()
        return list(self._bytes)

    def least(self) -> int:
        """Returns the number of the first place with the fewest bytes."""
        self._count_last()
        return self._bytes.index(min(self._bytes))

    def note(self, handle: tf.Operation) -> None:
        """Remembers a ``VarHandleOp``, to be counted on the device where it ends up."""
        self._count_last()
        self._last = handle, _bytes_of_op(handle)

    def add(self, device: str, num_bytes: int) -> None:
        """Counts ``num_bytes`` for the place of ``device``."""
        place = self._place_of(device)
        if place is not None:
            self._bytes[place] += num_bytes

    def _count_last(self) -> None:
        if self._last is not None:
            (handle, num_bytes), self._last = self._last, None
            self.add(handle.device, num_bytes)


def _bytes_of_op(op: tf.Operation) -> int:
    """Counts the bytes of a handle's variable, or of an op's first output."""
    if op.type != "VarHandleOp":
        return bytes_of(op.name, op.outputs[0].shape, op.outputs[0].dtype)
    shape = tf.TensorShape(op.get_attr("shape"))
    return bytes_of(op.name, shape, tf.as_dtype(op.get_attr("dtype")))


def bytes_of(name: str, shape: tf.TensorShape, dtype: tf.DType) -> int:
    """Counts a variable's bytes; warns of unknown dimensions, which count as 1."""
    count = int(dtype.size)
    for size in shape.as_list() if shape.rank else []:
        count *= 1 if size is None else int(size)
    if not shape.is_fully_defined():
        _log.warning(
            "variable %s has the shape %s, not fully known; counted as %d bytes, each "
            "unknown dimension as 1.",
            name,
            shape,
            count,
        )
    return count

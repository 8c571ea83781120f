"""Bytes of variables on each of several places, and which place has the fewest.

A place is a device or a parameter server task. TensorFlow asks a device function
about a variable first and moves the variable to another one's device afterwards,
where the two are colocated, as an optimizer's slots are. So what is counted is
where the last variable went, found out when the next one comes.
"""

import logging
from collections.abc import Callable

import tensorflow as tf

_log = logging.getLogger("tw_core")


class ByteLoads:
    """Counts the bytes of variable handles by place."""

    def __init__(self, places: int, place_of: Callable[[str], int | None]) -> None:
        """Starts with nothing on any place.

        Args:
          places: how many there are.
          place_of: takes a device string and returns the number of its place,
            or None for a device that is none of them.
        """
        self._bytes = [0] * places
        self._place_of = place_of
        self._last: tuple[tf.Operation, int] | None = None

    @property
    def bytes(self) -> list[int]:
        """Bytes on each place."""
        self._count_last()
        return list(self._bytes)

    def least(self) -> int:
        """Returns the number of the first place with the fewest bytes."""
        self._count_last()
        return self._bytes.index(min(self._bytes))

    def note(self, handle: tf.Operation) -> None:
        """Remembers a ``VarHandleOp``; it counts for the device that it ends on."""
        self._count_last()
        self._last = handle, bytes_of_op(handle)

    def add(self, device: str, num_bytes: int) -> None:
        """Counts ``num_bytes`` for the place of ``device``."""
        place = self._place_of(device)
        if place is not None:
            self._bytes[place] += num_bytes

    def _count_last(self) -> None:
        if self._last is not None:
            (handle, num_bytes), self._last = self._last, None
            self.add(handle.device, num_bytes)


def bytes_of_op(op: tf.Operation) -> int:
    """Counts the bytes of the variable that a handle is of, or of an op's output."""
    if op.type != "VarHandleOp":
        return bytes_of(op.name, op.outputs[0].shape, op.outputs[0].dtype)
    shape = tf.TensorShape(op.get_attr("shape"))
    return bytes_of(op.name, shape, tf.as_dtype(op.get_attr("dtype")))


def bytes_of(name: str, shape: tf.TensorShape, dtype: tf.DType) -> int:
    """Counts the bytes of a variable, and says so where its shape is not fully known.

    Args:
      name: of the variable, for the log.
      shape: an unknown dimension counts as 1, an unknown rank as a scalar.
      dtype: of one element.
    """
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

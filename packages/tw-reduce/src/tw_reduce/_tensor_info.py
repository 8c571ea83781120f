"""Tensors as planners see them: plain values, so that plans need no TensorFlow."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import tensorflow as tf

from tw_core.internal import (
    PACKED_BELOW,
    PackPlan,
    check_flag,
    check_gradients,
    check_text,
    check_whole_number,
    packed_below,
    plan_packing,
)
from tw_reduce._checks import check_items
from tw_reduce._reducer import Tensorlike, TowerTensors


@dataclass(frozen=True)
class TensorInfo:
    """One gradient of one tower, as planners see it.

    Attributes:
      index: its position n in a tower's list.
      shape: static shape; None for an unknown dimension or rank.
        Of an ``IndexedSlices`` the shape of its values.
      dtype: dtype name, such as ``"float32"``.
      itemsize: bytes per element.
      is_sparse: whether it is an ``IndexedSlices``.

    Raises:
      TypeError: a value of another type.
      ValueError: a negative number.
    """

    index: int
    shape: tuple[int | None, ...] | None
    dtype: str
    itemsize: int
    is_sparse: bool = False

    def __post_init__(self) -> None:
        """Refuses values that no planner can use."""
        check_whole_number(index=self.index, at_least=0)
        check_whole_number(itemsize=self.itemsize, at_least=0)
        check_text(dtype=self.dtype)
        check_flag(is_sparse=self.is_sparse)
        if self.shape is not None and not isinstance(self.shape, tuple):
            raise TypeError(
                f"TensorInfo: shape must be a tuple of sizes or None; got "
                f"{self.shape!r}."
            )
        for size in self.shape or ():
            if size is not None:
                check_whole_number(shape=size, at_least=0)

    @property
    def num_elements(self) -> int | None:
        """Elements (of the values, if sparse), or None if unknown."""
        if self.shape is None:
            return None
        known = [size for size in self.shape if size is not None]
        return prod(known) if len(known) == len(self.shape) else None

    @property
    def num_bytes(self) -> int | None:
        """Bytes (of the values, if sparse), or None if unknown."""
        count = self.num_elements
        return None if count is None else count * self.itemsize


def describe(tensors: Sequence[Tensorlike]) -> tuple[TensorInfo, ...]:
    """Describes one tower's N tensors for planners.

    Raises:
      ValueError: a tensor is None.
      TypeError: something that is not a tensor.
    """
    check_gradients([tensors])
    return tuple(_describe(n, tensor) for n, tensor in enumerate(tensors))


def describe_columns(grads: TowerTensors) -> tuple[TensorInfo, ...]:
    """Describes the N gradients of checked towers; sparse where any tower's is."""
    typical = (
        next((own for own in column if isinstance(own, tf.IndexedSlices)), column[0])
        for column in zip(*grads, strict=True)
    )
    return tuple(_describe(n, tensor) for n, tensor in enumerate(typical))


def below_on(devices: Sequence[str], below_bytes: int | None) -> int | None:
    """Returns the threshold of packs: on GPUs that of float32, if none is given."""
    elements = packed_below(devices)
    if below_bytes is not None or elements == PACKED_BELOW:
        return below_bytes
    return elements * int(tf.float32.size)


def is_small(info: TensorInfo, below_bytes: int | None) -> bool:
    """Whether a gradient is packed: dense, of known size, and below the threshold."""
    if below_bytes is None:
        size, below = info.num_elements, PACKED_BELOW
    else:
        size, below = info.num_bytes, below_bytes
    return size is not None and size < below and not info.is_sparse


def packs_of(infos: Sequence[TensorInfo], below_bytes: int | None) -> PackPlan:
    """As ``plan_packs`` for checked arguments; positions are indices of ``infos``."""
    return plan_packing(
        [info.dtype if is_small(info, below_bytes) else None for info in infos]
    )


def check_infos(infos: Sequence[TensorInfo]) -> None:
    """Refuses anything but a list of ``TensorInfo``."""
    wanted = "hold TensorInfo, as describe returns them"
    check_items(TensorInfo, "TensorInfo", wanted, infos=infos)


def _describe(index: int, tensor: Tensorlike) -> TensorInfo:
    is_sparse = isinstance(tensor, tf.IndexedSlices)
    dense = tensor.values if is_sparse else tensor
    info = object.__new__(TensorInfo)  # A tensor's properties need no checks.
    vars(info).update(
        index=index,
        shape=None if dense.shape.rank is None else tuple(dense.shape.as_list()),
        dtype=dense.dtype.name,
        itemsize=dense.dtype.size,
        is_sparse=is_sparse,
    )
    return info

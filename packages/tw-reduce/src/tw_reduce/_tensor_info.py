"""What a plan may know of a tensor: plain values, so that plans need no TensorFlow."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import tensorflow as tf

from tw_core.checks import check_flag, check_list, check_text, check_whole_number
from tw_reduce._reducer import (
    Tensorlike,
    TowerTensors,
    check_tower_tensors,
    dense_part,
)


@dataclass(frozen=True)
class TensorInfo:
    """One gradient of one tower, as planners see it.

    Attributes:
      index: its position n in a tower's list.
      shape: static shape; None for an unknown dimension, or for all of it.
        Of an ``IndexedSlices`` the shape of its values.
      dtype: dtype name, such as ``"float32"``.
      itemsize: bytes per element.
      is_sparse: whether it is an ``IndexedSlices``.

    Raises:
      TypeError: something of another type.
      ValueError: a negative number.
    """

    index: int
    shape: tuple[int | None, ...] | None
    dtype: str
    itemsize: int
    is_sparse: bool = False

    def __post_init__(self) -> None:
        """Refuses what no planner can count with."""
        check_whole_number("TensorInfo", index=self.index, at_least=0)
        check_whole_number("TensorInfo", itemsize=self.itemsize, at_least=0)
        check_text("TensorInfo", dtype=self.dtype)
        check_flag("TensorInfo", is_sparse=self.is_sparse)
        if self.shape is not None and not isinstance(self.shape, tuple):
            raise TypeError(
                f"TensorInfo: shape must be a tuple of sizes or None; got "
                f"{self.shape!r}."
            )
        for size in self.shape or ():
            if size is not None:
                check_whole_number("TensorInfo", shape=size, at_least=0)

    @property
    def num_elements(self) -> int | None:
        """Elements (of the values, if sparse), or None where not known."""
        if self.shape is None:
            return None
        known = [size for size in self.shape if size is not None]
        return prod(known) if len(known) == len(self.shape) else None

    @property
    def num_bytes(self) -> int | None:
        """Bytes (of the values, if sparse), or None where not known."""
        count = self.num_elements
        return None if count is None else count * self.itemsize


def describe(tensors: Sequence[Tensorlike]) -> tuple[TensorInfo, ...]:
    """Notes what planners need of one tower's N tensors.

    Raises:
      ValueError: a tensor is None.
      TypeError: something that is no tensor.
    """
    check_tower_tensors([tensors], caller="describe")
    return _describe(tensors)


def check_infos(infos: Sequence[TensorInfo], *, caller: str) -> None:
    """Refuses what is no list of ``TensorInfo``."""
    check_list(caller, infos=infos, of="TensorInfo", empty=True)
    others = [
        f"{n} ({type(info).__name__})"
        for n, info in enumerate(infos)
        if not isinstance(info, TensorInfo)
    ]
    if others:
        raise TypeError(
            f"{caller}: infos must hold TensorInfo, as describe gives them; got others "
            f"at {', '.join(others)}."
        )


def _describe(tensors: Sequence[Tensorlike]) -> tuple[TensorInfo, ...]:
    return tuple(_describe_one(n, tensor) for n, tensor in enumerate(tensors))


def describe_columns(grads: TowerTensors) -> tuple[TensorInfo, ...]:
    """Describes the N gradients; sparse where any tower's is sparse."""
    by_tower = [_describe(tower) for tower in grads]
    return tuple(
        next((info for info in column if info.is_sparse), column[0])
        for column in zip(*by_tower, strict=True)
    )


def _describe_one(index: int, tensor: Tensorlike) -> TensorInfo:
    dense = dense_part(tensor)
    shape = None if dense.shape.rank is None else tuple(dense.shape.as_list())
    return TensorInfo(
        index=index,
        shape=shape,
        dtype=dense.dtype.name,
        itemsize=dense.dtype.size,
        is_sparse=isinstance(tensor, tf.IndexedSlices),
    )

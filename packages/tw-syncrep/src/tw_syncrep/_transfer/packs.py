"""Packs: which tensors travel together, and how they are joined and cut.

A transfer over gRPC costs about as much as copying a hundred kilobytes, so small
tensors to one server are joined. A tensor of a mebibyte or more would be copied for
nothing, and travels alone. The plan follows from what the graph knows before anything
runs, and is the same in every worker's process.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf

from tw_core import flat_packs

SMALL_BYTES = 1 << 20
"""From this size on, joining costs more than it saves."""


@dataclass(frozen=True)
class Pack:
    """Tensors of one server and dtype that travel as one.

    Attributes:
      server: device of the parameter server, as the graph names it.
      dtype: name of the element type.
      indices: the tensors' places in the caller's list.
      shapes: their shapes, in the same order.
    """

    server: str
    dtype: str
    indices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what travels: a single tensor keeps its own, several are flat."""
        return self.shapes[0] if self._is_single else (sum(self._sizes),)

    def join(self, tensors: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Joins the pack's tensors, given by index, to what travels."""
        if self._is_single:
            return tensors[self.indices[0]]
        return tf.concat([tf.reshape(tensors[n], [-1]) for n in self.indices], axis=0)

    def cut(self, joined: tf.Tensor) -> dict[int, tf.Tensor]:
        """Undoes ``join``; the tensors by index, on the current device."""
        if self._is_single:
            return {self.indices[0]: joined}
        parts = tf.split(joined, self._sizes)
        return {
            n: tf.reshape(part, shape)
            for n, part, shape in zip(self.indices, parts, self.shapes, strict=True)
        }

    @property
    def _is_single(self) -> bool:
        return len(self.indices) == 1

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]


def is_small(variable: tf.Variable, below_bytes: int) -> bool:
    """Returns whether a tensor of the variable's (fully known) size may be joined."""
    size = variable.shape.num_elements() * variable.dtype.base_dtype.size
    return bool(size < below_bytes)


def plan_packs(
    variables: Mapping[int, tf.Variable], *, below_bytes: int
) -> tuple[Pack, ...]:
    """Plans which tensors of the variables' sizes are joined, by server and dtype.

    Args:
      variables: by index, in the caller's order; what travels has their device,
        dtype and (fully known) shape.
      below_bytes: a tensor of this size or larger travels alone; 0 joins none.

    Returns:
      Packs in the order of their first tensors, every index in exactly one.
    """
    indices = list(variables)
    keys = [_key_if_small(variables[n], below_bytes) for n in indices]
    return tuple(
        _make_pack(variables, [indices[place] for place in group])
        for group in flat_packs.plan_packs(keys).groups
    )


def _key_if_small(variable: tf.Variable, below_bytes: int) -> tuple[str, str] | None:
    """Returns what the tensors of a pack have in common; None for a large one."""
    if not is_small(variable, below_bytes):
        return None
    return variable.device, variable.dtype.base_dtype.name


def _make_pack(variables: Mapping[int, tf.Variable], group: list[int]) -> Pack:
    first = variables[group[0]]
    return Pack(
        first.device,
        first.dtype.base_dtype.name,
        tuple(group),
        tuple(tuple(variables[n].shape.as_list()) for n in group),
    )

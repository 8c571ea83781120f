"""Packs: which tensors are sent together, and how they are joined and cut.

A transfer over gRPC costs about as much as copying a hundred kilobytes, so small
tensors to one server are joined. A tensor of a mebibyte or more is sent alone: copying
it would gain nothing. The plan follows from static properties of the graph, and is the
same in every worker's process.

A few integers, such as a ticket, need no transfer of their own either: they are sent
as the *head* of a pack of floats, one byte per element. Every float type of two bytes
or more holds a byte exactly, so no copy or cast between floats can change it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from tw_core.internal import cut_flat, join_flat, plan_packing

SMALL_BYTES = 1 << 20
"""From this size on, joining costs more than it saves."""

_BYTES_PER_NUMBER = 8


@dataclass(frozen=True)
class Pack:
    """Tensors of one server and dtype that are sent as one."""

    server: str  # device, as the graph names it
    dtype: str
    indices: tuple[int, ...]  # in the caller's list
    shapes: tuple[tuple[int, ...], ...]
    is_small: bool  # whether it may be copied in transit
    numbers: int = 0  # integers in the head

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in transit: a single tensor keeps its own, all others are flat."""
        return self.shapes[0] if self._is_as_it_was else (sum(self._sizes),)

    def join(
        self, tensors: Mapping[int, tf.Tensor], head: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Joins the pack's tensors, given by index, after the head, int64 [numbers]."""
        if self._is_as_it_was:
            return tensors[self.indices[0]]
        own = [tensors[n] for n in self.indices]
        if head is not None:
            own.insert(0, _as_bytes(head, own[0].dtype))
        return join_flat(own)

    def prepend(self, head: tf.Tensor | None, joined: tf.Tensor) -> tf.Tensor:
        """Prepends the head to a pack that was joined without it."""
        if head is None:
            return joined
        return tf.concat([_as_bytes(head, joined.dtype), joined], axis=0)

    def cut(self, joined: tf.Tensor) -> dict[int, tf.Tensor]:
        """Undoes ``join``: returns the tensors by index, on the current device."""
        return self.open(joined)[1]

    def open(self, joined: tf.Tensor) -> tuple[tf.Tensor | None, dict[int, tf.Tensor]]:
        """Returns the head, if there is one, and the tensors by index."""
        if self._is_as_it_was:
            return None, {self.indices[0]: joined}
        head_size = self._sizes[: len(self._sizes) - len(self.shapes)]
        parts = cut_flat(joined, [*([size] for size in head_size), *self.shapes])
        head = _as_numbers(parts.pop(0)) if self.numbers else None
        return head, dict(zip(self.indices, parts, strict=True))

    def read_head(self, joined: tf.Tensor) -> tf.Tensor:
        """Returns the head of a joined pack, int64 [numbers]."""
        return _as_numbers(joined[: self._sizes[0]])

    @property
    def _is_as_it_was(self) -> bool:
        return len(self.indices) == 1 and not self.numbers

    @property
    def _sizes(self) -> list[int]:
        head = [_BYTES_PER_NUMBER * self.numbers] if self.numbers else []
        return head + [math.prod(shape) for shape in self.shapes]


def _as_bytes(numbers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Encodes integers, int64 [P], as bytes in elements of a float dtype."""
    return tf.cast(tf.reshape(tf.bitcast(numbers, tf.uint8), [-1]), dtype)


def _as_numbers(elements: tf.Tensor) -> tf.Tensor:
    """Undoes ``_as_bytes``."""
    table = tf.reshape(tf.cast(elements, tf.uint8), [-1, _BYTES_PER_NUMBER])
    return tf.bitcast(table, tf.int64)


def holds_bytes(dtype: tf.DType) -> bool:
    """Returns whether a dtype is a float type that is exact for 0 to 255."""
    return bool(dtype.is_floating and dtype.size > 1)


def with_head(
    packs: Sequence[Pack], *, numbers: int, server: str, below_bytes: float = math.inf
) -> tuple[Pack, ...]:
    """Gives a head to the server's first pack that can take one, if any.

    A pack of ``below_bytes`` or more cannot: it would be copied for the head.
    """
    for place, pack in enumerate(packs):
        dtype = tf.as_dtype(pack.dtype)
        size = math.prod(pack.shape) * dtype.size
        takes_head = pack.is_small and holds_bytes(dtype) and size < below_bytes
        if pack.server == server and takes_head:
            carrier = replace(pack, numbers=numbers)
            return (*packs[:place], carrier, *packs[place + 1 :])
    return tuple(packs)


def is_small(variable: tf.Variable, below_bytes: int) -> bool:
    """Returns whether a tensor of the variable's (fully known) size may be joined."""
    size = variable.shape.num_elements() * variable.dtype.base_dtype.size
    return bool(size < below_bytes)


def plan_packs(
    variables: Mapping[int, tf.Variable], *, below_bytes: int
) -> tuple[Pack, ...]:
    """Joins small tensors by server and dtype, in the order of their first tensors."""
    indices = list(variables)
    keys = [
        (v.device, v.dtype.base_dtype.name) if is_small(v, below_bytes) else None
        for v in variables.values()
    ]
    packs = []
    for places in plan_packing(keys).groups:
        group = tuple(indices[place] for place in places)
        first = variables[group[0]]
        pack = Pack(
            first.device,
            first.dtype.base_dtype.name,
            group,
            tuple(tuple(variables[n].shape.as_list()) for n in group),
            is_small=keys[places[0]] is not None,
        )
        packs.append(pack)
    return tuple(packs)

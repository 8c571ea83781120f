"""Which gradients travel together: packs of small ones, large ones alone.

A transfer over gRPC costs about as much as copying a hundred kilobytes, so many
small tensors to one server are joined. A tensor of a mebibyte and more would be
copied for nothing, and goes alone. The plan is made from what the graph knows
before anything runs, and is the same in every worker's process.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One dense tensor that travels.

    Attributes:
      index: its place in the caller's list.
      server: device of the parameter server it belongs to, as the graph names it.
      dtype: name of its element type.
      shape: its sizes, all known.
      itemsize: bytes of an element.
    """

    index: int
    server: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        """Elements."""
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Pack:
    """Tensors of one server and dtype that travel as one.

    Attributes:
      server: where they go.
      dtype: name of the element type.
      pieces: in the caller's order; a pack of one keeps its shape.
    """

    server: str
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def is_alone(self) -> bool:
        """Whether it holds one tensor, which then needs no flattening."""
        return len(self.pieces) == 1


def plan_packs(pieces: Sequence[Piece], *, below: int) -> tuple[Pack, ...]:
    """Joins tensors of the same server and dtype.

    Args:
      pieces: what travels, in the caller's order.
      below: bytes; a tensor of that many and more travels alone. 0 joins none.

    Returns:
      Packs, those that join first by the first tensor in them, every piece in
      exactly one.

    Raises:
      ValueError: ``below`` is negative.
    """
    if below < 0:
        raise ValueError(
            f"plan_packs: below must be 0 (join nothing) or more bytes; got {below}."
        )
    joined: dict[object, list[Piece]] = {}
    for piece in pieces:
        is_small = piece.size * piece.itemsize < below
        key = (piece.server, piece.dtype) if is_small else piece.index
        joined.setdefault(key, []).append(piece)
    return tuple(
        Pack(group[0].server, group[0].dtype, tuple(group)) for group in joined.values()
    )


def servers_of(packs: Sequence[Pack]) -> tuple[str, ...]:
    """Returns the servers of the packs, each once, in order of appearance."""
    return tuple(dict.fromkeys(pack.server for pack in packs))

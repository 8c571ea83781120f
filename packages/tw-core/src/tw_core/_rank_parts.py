"""Reduce-scatter and all-gather of flat tensors, for any group of ranks.

A group that has ``reduce_scatter`` and ``all_gather`` runs them; in any other, ``sum``
adds all parts, or each rank's part padded with zeros. Long parts are sent in pieces,
one after the other, since an exchange copies its input several times.

A rank that adds dense tensors sends them whole or in parts: exchanges, and those who
describe them, take that rule from here.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import tensorflow as tf

from tw_core.ranks import RankGroup, ScatteringGroup

ALONE_BYTES = 1 << 21
"""From this size on tensors of a sum are not packed, which would copy them twice."""

MESSAGE_BYTES = 600
"""What a message of TensorFlow takes apart from its tensor, as counted on the wire."""

_GATHERED_BYTES = 1 << 16
_NARROW = ("float16", "bfloat16")
_PIECE = 1 << 22  # elements per rank


def is_gathered(num_bytes: int, ranks: int) -> bool:
    """Returns whether ranks gather all tensors, and add them, instead of reducing.

    That takes half as many messages, each with a whole tensor.
    """
    return num_bytes * (ranks - 1) <= _GATHERED_BYTES


def bytes_sent(tensors: Sequence[tuple[str, int]], ranks: int) -> int:
    """Returns how many bytes a rank sends for a sum of dense tensors.

    ``tensors``: the dtype and the number of bytes of each. Over MPI and in buckets,
    small ones may take another way.
    """
    packs = [own for own in tensors if own[1] >= ALONE_BYTES]
    small = [own for own in tensors if own[1] < ALONE_BYTES]
    for dtype in {name for name, _ in small}:
        packs.append((dtype, sum(size for name, size in small if name == dtype)))
    total = 0
    for dtype, size in packs:
        if is_gathered(size, ranks) and dtype not in _NARROW:
            total += (ranks - 1) * (size + MESSAGE_BYTES)
        else:
            total += 2 * (ranks - 1) * (-(-size // ranks) + MESSAGE_BYTES)
    return total


def reduce_scatter(group: RankGroup, parts: Sequence[Any], *, name: str) -> Any:
    """Returns the sum over the ranks of their ``parts[rank]``."""
    if group.size == 1:
        return parts[0]
    longest, sums = max(part.shape[0] for part in parts), list[Any]()
    if longest > _PIECE:
        for first in range(0, longest, _PIECE):
            with tf.control_dependencies(sums[-1:]):
                piece = [part[first : first + _PIECE] for part in parts]
            sums.append(reduce_scatter(group, piece, name=f"{name}, from {first}"))
        return tf.concat(sums, axis=0)
    if isinstance(group, ScatteringGroup):
        return group.reduce_scatter(parts, name=name)
    (total,) = group.sum([tf.concat(parts, axis=0)], names=[name])
    first, last = _bounds([part.shape[0] for part in parts])[group.rank]
    return total[first:last]


def all_gather(
    group: RankGroup, own: Any, lengths: Sequence[int], *, name: str
) -> list[Any]:
    """Returns [size] flat tensors, each rank's own."""
    if group.size == 1:
        return [own]
    if (longest := max(lengths)) > _PIECE:
        found = list[list[Any]]()
        for first in range(0, longest, _PIECE):
            with tf.control_dependencies(found[-1] if found else []):
                piece = own[first : first + _PIECE]
            left = [min(_PIECE, max(0, length - first)) for length in lengths]
            found.append(all_gather(group, piece, left, name=f"{name}, from {first}"))
        return [tf.concat(of_rank, axis=0) for of_rank in zip(*found, strict=True)]
    if isinstance(group, ScatteringGroup):
        return list(group.all_gather(own, lengths, name=name))
    wide = tf.float32 if own.dtype.name in _NARROW else own.dtype
    bounds = _bounds(lengths)
    first, last = bounds[group.rank]
    among = tf.pad(tf.cast(own, wide), [[first, bounds[-1][1] - last]])
    (total,) = group.sum([among], names=[name])
    return [tf.cast(total[first:last], own.dtype) for first, last in bounds]


def all_to_all(group: Any, rows: tf.Tensor, *, name: str) -> tf.Tensor:
    """Returns [size, n], all ranks' rows for this one; of an ``AllToAllGroup``."""
    width = rows.shape[1]
    if group.size == 1 or not width:
        return rows
    if width <= _PIECE:
        return group.all_to_all(rows, name=name)
    found = list[Any]()
    for first in range(0, width, _PIECE):
        with tf.control_dependencies(found[-1:]):
            piece = rows[:, first : first + _PIECE]
        found.append(all_to_all(group, piece, name=f"{name}, from {first}"))
    return tf.concat(found, axis=1)


def _bounds(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(lengths))
    return list(zip([0, *ends[:-1]], ends, strict=True))

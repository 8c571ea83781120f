"""Reduce-scatter and all-gather of flat tensors, for any group of ranks.

A group that has ``reduce_scatter`` and ``all_gather`` runs them; in any other, ``sum``
adds all parts, or each rank's part padded with zeros. Long parts are sent in pieces,
one after the other, since an exchange copies its input several times.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import tensorflow as tf

from tw_core.ranks import RankGroup, ScatteringGroup

_NARROW = ("float16", "bfloat16")
_PIECE = 1 << 22  # elements per rank


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


def _bounds(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(lengths))
    return list(zip([0, *ends[:-1]], ends, strict=True))

"""Cutting a batch into the towers' parts, as evenly as possible, larger ones first."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import tensorflow as tf

from tw_core import Tower

Sizes = Sequence[int] | Sequence[tf.Tensor]


def plan_sizes(rows: int, num_parts: int) -> list[int]:
    """Returns how many rows each part gets.

    >>> plan_sizes(10, 4)
    [3, 3, 2, 2]
    """
    least, more = divmod(rows, num_parts)
    return [least + (k < more) for k in range(num_parts)]


def check_batch(spec: Any) -> None:
    """Refuses the ``element_spec`` of a batch that cannot be cut."""
    none = type(tf.type_spec_from_value(None))
    leaves = [leaf for leaf in tf.nest.flatten(spec) if not isinstance(leaf, none)]
    others = [leaf for leaf in leaves if not isinstance(leaf, _KINDS)]
    if others:
        raise TypeError(
            f"A batch must hold dense, ragged and sparse tensors; got {others}."
        )
    scalars = [leaf for leaf in leaves if leaf.shape.rank == 0]
    if scalars:
        raise ValueError(
            "Every tensor of a batch must have rows, which are divided among towers; "
            f"got {len(scalars)} scalar(s). Call batch() on the dataset, and repeat "
            "values that are the same for all rows."
        )
    if len({_known_rows(leaf) for leaf in leaves} - {None}) > 1:
        raise ValueError(
            "All tensors of a batch must have the same number of rows; got "
            f"{[str(leaf.shape) for leaf in leaves]}."
        )


def part_sizes(data: Any, num_parts: int) -> Sizes:
    """Returns the rows of each part: ints where known, else int64 scalars.

    The scalars fail at run time if the tensors have different numbers of rows.
    """
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    known = [_known_rows(leaf) for leaf in leaves]
    if known[0] is not None and None not in known:
        return plan_sizes(known[0], num_parts)
    rows = [rows_of(leaf) for leaf in leaves]
    message = "A batch's tensors must have the same number of rows; they have:"
    same = tf.reduce_all(tf.equal(rows, rows[0]))
    with tf.control_dependencies([tf.debugging.Assert(same, [message, rows])]):
        least, more = rows[0] // num_parts, rows[0] % num_parts
    return [least + tf.cast(k < more, tf.int64) for k in range(num_parts)]


def cut(data: Any, sizes: Sizes, *, lends_row: bool = False) -> list[Any]:
    """Cuts a batch into K nests like ``data``; part k has ``sizes[k]`` rows.

    With ``lends_row`` a part without rows gets the batch's last row, for layers that
    need at least one.
    """
    may_lack = not isinstance(sizes[0], int) or 0 in sizes
    split = _split_lending if lends_row and may_lack else _split
    columns = [
        [leaf] * len(sizes) if leaf is None or len(sizes) == 1 else split(leaf, sizes)
        for leaf in tf.nest.flatten(data)
    ]
    pieces = zip(*columns, strict=True)
    return [tf.nest.pack_sequence_as(data, list(own)) for own in pieces]


def on_devices(parts: Sequence[Any], towers: Sequence[Tower]) -> list[Any]:
    """Copies part k, a nest of tensors, to tower k's device; ragged ones whole."""
    copies = []
    for part, tower in zip(parts, towers, strict=True):
        with tf.device(tower.device):
            own = tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf),
                part,
                expand_composites=True,
            )
        copies.append(own)
    return copies


def rows_of(leaf: Any) -> tf.Tensor:
    """Returns the number of rows of a tensor of any kind, an int64 scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, tf.int64)[0]


_KINDS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def _split(leaf: Any, sizes: Sizes) -> Sequence[Any]:
    starts = [0, *accumulate(sizes)][:-1]
    if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor):
        return [_slice(leaf, *own) for own in zip(starts, sizes, strict=True)]
    lengths = sizes if isinstance(sizes[0], int) else tf.stack(sizes)
    pieces: list[tf.Tensor] = tf.split(leaf, lengths, num=len(sizes))
    return pieces


def _split_lending(leaf: Any, sizes: Sizes) -> Sequence[Any]:
    *starts, rows = 0, *accumulate(sizes)
    if isinstance(rows, int):
        least, most = min, max
    else:
        least, most = tf.minimum, tf.maximum
        starts[0] = tf.zeros_like(rows)
    last, one = most(rows - 1, 0), least(rows, 1)
    return [
        _slice(leaf, least(start, last), most(size, one))
        for start, size in zip(starts, sizes, strict=True)
    ]


def _slice(leaf: Any, start: Any, size: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.slice(leaf, _first(leaf, start), _shape(leaf, size))
    return leaf[start : start + size]


def _first(leaf: tf.SparseTensor, start: Any) -> tf.Tensor:
    zeros = tf.zeros_like(leaf.dense_shape[1:])
    return tf.concat([[tf.cast(start, tf.int64)], zeros], axis=0)


def _shape(leaf: tf.SparseTensor, size: Any) -> tf.Tensor:
    return tf.concat([[tf.cast(size, tf.int64)], leaf.dense_shape[1:]], axis=0)


def _known_rows(leaf: Any) -> int | None:
    if leaf.shape.rank is None:
        return None
    # With version 2 behaviour off a dimension is an object, even if it is unknown.
    rows: int | None = tf.compat.dimension_value(leaf.shape[0])
    return rows

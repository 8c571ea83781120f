"""A step's batches: converted to tensors, described by specs, and joined from parts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import tensorflow as tf

from tw_builders.internal import check_batch, part_sizes, rows_of
from tw_core.internal import Gradients
from tw_reduce.internal import add_on_device, mean_by_weight


def tensors(data: Any) -> Any:
    """Converts a batch's arrays, which eager steps receive, to tensors."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.constant(leaf),
        data,
    )


def after(data: Any) -> AbstractContextManager[Any]:
    """Makes a step's side effects wait for its batch, even those that do not read it.

    Data of unknown length ends with a step without a batch, in which TensorFlow would
    still run other effects: a counter of updates, a random generator.
    """
    leaves = tf.nest.flatten(data, expand_composites=True)
    leaves = [leaf for leaf in leaves if tf.is_tensor(leaf)]
    if tf.executing_eagerly() or not leaves:
        return nullcontext()
    leaf = min(leaves, key=_cost_to_wait_for)
    waits: AbstractContextManager[Any] = tf.control_dependencies([tf.identity(leaf)])
    return waits


def _cost_to_wait_for(leaf: tf.Tensor) -> tuple[bool, int]:
    # XLA, which may compile the operations that wait, does not support strings.
    sizes = leaf.shape.as_list() if leaf.shape.rank else []
    return leaf.dtype == tf.string, prod(size or 1 for size in sizes)


def checked_sizes(data: Any, num_parts: int) -> Any:
    """Checks a batch of tensors; returns the number of rows in each tower's part."""
    specs = [
        tf.type_spec_from_value(leaf)
        for leaf in tf.nest.flatten(data)
        if leaf is not None
    ]
    if not specs:
        raise ValueError("TowerModel: a batch must hold at least one tensor; got none.")
    check_batch(specs)
    return part_sizes(data, num_parts)


def lent_rows(sizes: Sequence[Any]) -> Any:
    """Returns how many towers have only a padding row; None if none can."""
    if isinstance(sizes[0], int):
        return sizes.count(0) or None
    return len(sizes) - tf.math.count_nonzero(tf.stack(sizes), dtype=tf.int32)


def have_rows(sizes: Sequence[Any]) -> list[tf.Tensor] | None:
    """Returns which towers have rows, apart from padding; None if all do."""
    if isinstance(sizes[0], int) and 0 not in sizes:
        return None
    return [tf.convert_to_tensor(size > 0) for size in sizes]


def join(
    parts: Sequence[Any], lent: Any = None, sizes: Sequence[Any] | None = None
) -> Any:
    """Joins K nests of tensors along their rows, in the towers' order.

    The last ``lent`` of them are dropped. A tower may return more rows than it
    received, such as one per token. Floating-point scalars are averaged, weighted by
    ``sizes``; for other scalars the first is returned.
    """

    def join_leaf(*pieces: Any) -> Any:
        if pieces[0] is None:
            return None
        if sizes is not None and pieces[0].shape.rank == 0:
            return _mean(pieces, sizes) if pieces[0].dtype.is_floating else pieces[0]
        if isinstance(pieces[0], tf.SparseTensor):
            joined = tf.sparse.concat(0, list(pieces))
        else:
            own = pieces[0].device if isinstance(pieces[0], tf.Tensor) else None
            with tf.device(own):
                joined = tf.concat(list(pieces), axis=0)
        return joined if lent is None else _without_last(joined, pieces[-1], lent)

    return tf.nest.map_structure(join_leaf, *parts)


def _mean(values: Sequence[Any], sizes: Sequence[Any]) -> Any:
    add = partial(add_on_device, device=values[0].device)
    return mean_by_weight(add, sizes, Gradients([own] for own in values))[0][0]


def _without_last(joined: Any, last: Any, times: Any) -> Any:
    """Drops the last ``times * rows(last)`` rows."""
    times = tf.cast(times, tf.int64)
    if isinstance(joined, tf.SparseTensor):
        shape = joined.dense_shape
        rows = shape[:1] - times * last.dense_shape[:1]
        kept = tf.concat([rows, shape[1:]], axis=0)
        return tf.sparse.slice(joined, tf.zeros_like(shape), kept)
    return joined[: rows_of(joined) - times * rows_of(last)]


def specs(data: Any) -> Any:
    """Returns a batch's nest of specs; ``data`` may be one already."""

    def spec(leaf: Any) -> Any:
        is_spec = leaf is None or isinstance(leaf, tf.TypeSpec)
        return leaf if is_spec else tf.type_spec_from_value(leaf)

    return tf.nest.map_structure(spec, data)


def any_rows(data: Any) -> Any:
    """Returns a batch's nest of specs, with an unspecified number of rows."""

    def spec(own: Any) -> Any:
        if isinstance(own, tf.TensorSpec | tf.SparseTensorSpec):
            return type(own)([None, *own.shape[1:]], own.dtype)
        return own

    return tf.nest.map_structure(spec, specs(data))


def static_rows(data: Any) -> int | None:
    """Returns a batch's number of rows, if that is known."""
    known: list[int | None] = [
        own.shape[0] for own in tf.nest.flatten(specs(data)) if own is not None
    ]
    return known[0]

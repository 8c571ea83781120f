"""Batches as Keras passes them to a step: as tensors, as specs, and joined again."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_builders._parts import check_batch, part_sizes


def tensors(data: Any) -> Any:
    """Converts the arrays of a batch, which eager steps receive, to tensors."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.constant(leaf),
        data,
    )


def checked_sizes(data: Any, num_parts: int) -> Any:
    """Checks a batch of tensors; returns the number of rows of each tower's part."""
    specs = [
        tf.type_spec_from_value(leaf)
        for leaf in tf.nest.flatten(data)
        if leaf is not None
    ]
    if not specs:
        raise ValueError("TowerModel: a batch must hold at least one tensor; got none.")
    check_batch(specs)
    return part_sizes(data, num_parts)


def join(parts: Sequence[Any]) -> Any:
    """Joins K nests of tensors along their rows, in the towers' order."""

    def join_leaf(*pieces: Any) -> Any:
        if pieces[0] is None:
            return None
        if isinstance(pieces[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(pieces))
        with tf.device(pieces[0].device if isinstance(pieces[0], tf.Tensor) else None):
            return tf.concat(list(pieces), axis=0)

    return tf.nest.map_structure(join_leaf, *parts)


def any_rows(data: Any) -> Any:
    """Returns a batch's nest of shapes and dtypes, with any number of rows."""

    def spec(leaf: Any) -> tf.TensorSpec | None:
        if leaf is None:
            return None
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)

    return tf.nest.map_structure(spec, data)

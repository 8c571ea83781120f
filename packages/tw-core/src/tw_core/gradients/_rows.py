"""Sums of sparse gradients that keep rows distinct where they are in each tower.

TensorFlow's gradient of ``embedding_lookup_sparse``, and of Keras layers on a sparse
input, has each row once per batch: the indices are the result of ``Unique``. The
gradient of an ``Embedding`` has a row per lookup. An optimizer that squares rows one by
one (see ``_values.py``) treats the two differently. So a sum over towers, whose batches
are parts of one batch, adds up the rows that share an index where no tower can repeat
them, and keeps all rows otherwise. The gradient of a table that is read several times
is a concatenation, of which each part is summed separately.

The operations that computed the indices show whether rows can repeat, across calls of
functions and branches. Eager tensors have no such record, so their rows are not added
up: rows that happen to be distinct may repeat in the next batch.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core._modes import without_autograph
from tw_core._tf_compat import captured_from, functions_of
from tw_core.gradients._values import sum_duplicate_rows

_Call: TypeAlias = "tuple[tf.Operation, Any]"  # and the graph of its function

_DISTINCT = {"Unique": 0, "UniqueWithCounts": 0, "Range": 0} | dict.fromkeys(
    (
        "SparseSegmentSumGradV2",
        "SparseSegmentMeanGradV2",
        "SparseSegmentSqrtNGradV2",
    ),
    1,
)
"""Operations with an output, given by its number, that repeats no element."""

_KEEP = (
    *("Cast", "EnsureShape", "ExpandDims", "Identity", "PreventGradient"),
    *("Reshape", "Slice", "Squeeze", "StopGradient", "StridedSlice"),
)
"""Operations that may drop elements, but repeat none."""


@without_autograph
def add_rows(grads: Sequence[tf.IndexedSlices]) -> Any:
    """Adds sparse gradients of one variable by joining their rows.

    Args:
      grads: at least one, of one dtype.

    Returns:
      The rows of all. Rows that share an index are added up if ``has_unique_rows`` of
      each gradient, which is decided part by part (see ``split_rows``).
    """
    parts = [split_rows(grad) for grad in grads]
    if len({len(own) for own in parts}) > 1:
        parts = [[grad] for grad in grads]
    return join_rows([_add_part(column) for column in zip(*parts, strict=True)])


def _add_part(column: Sequence[tf.IndexedSlices]) -> Any:
    joined = join_rows(column)
    is_known = len(column) > 1 and all(map(has_unique_rows, column))
    return sum_duplicate_rows(joined) if is_known else joined


def join_rows(grads: Sequence[Any]) -> Any:
    """Returns the rows of several sparse gradients, one after the other.

    Args:
      grads: at least one, of one dtype. Indices of different dtypes become int64.

    Returns:
      Their rows, with the best known ``dense_shape`` among theirs. A single gradient,
      sparse or dense, is returned as it is.
    """
    if len(grads) == 1:
        return grads[0]
    indices = [grad.indices for grad in grads]
    if len({index.dtype for index in indices}) > 1:
        indices = [tf.cast(index, tf.int64) for index in indices]
    shaped = [grad for grad in grads if grad.dense_shape is not None]
    known = [grad for grad in shaped if grad.shape.is_fully_defined()]
    best = next(iter([*known, *shaped]), None)
    return tf.IndexedSlices(
        tf.concat([grad.values for grad in grads], axis=0),
        tf.concat(indices, axis=0),
        None if best is None else best.dense_shape,
    )


@without_autograph
def split_rows(grad: Any) -> list[Any]:
    """Splits a sparse gradient into those that TensorFlow concatenated.

    Args:
      grad: a tensor or an ``IndexedSlices``.

    Returns:
      The parts, whose rows are those of ``grad`` in the same order; ``[grad]`` for
      anything but a concatenation with a part that ``has_unique_rows``.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return [grad]
    parts = _concatenated(grad.indices)
    if len(parts) == 1 or not any(map(_is_distinct, parts)):
        return [grad]
    sizes = tf.stack([tf.size(part) for part in parts])
    values = tf.split(grad.values, sizes, num=len(parts))
    return [
        tf.IndexedSlices(own, part, grad.dense_shape)
        for own, part in zip(values, parts, strict=True)
    ]


def has_unique_rows(grad: Any) -> bool:
    """Returns whether a sparse gradient is known to have each index once.

    Args:
      grad: a tensor or an ``IndexedSlices``.

    Returns:
      True for an ``IndexedSlices`` with indices computed by an operation such as
      ``tf.unique``. False if nothing is known, as in eager mode.
    """
    return isinstance(grad, tf.IndexedSlices) and _is_distinct(grad.indices)


def _concatenated(indices: tf.Tensor) -> list[tf.Tensor]:
    """Lists the 1-D tensors that indices are a concatenation of."""
    whole = indices
    while not _is_eager(whole) and whole.op.type in ("Identity", "Reshape"):
        whole = whole.op.inputs[0]
    if _is_eager(whole) or whole.op.type != "ConcatV2" or whole.shape.rank != 1:
        return [indices]
    *parts, _ = whole.op.inputs
    return [own for part in parts for own in _concatenated(part)]


def _is_eager(tensor: tf.Tensor) -> bool:
    return hasattr(tensor, "numpy")


def _is_distinct(tensor: tf.Tensor, inside: tuple[_Call, ...] = ()) -> bool:
    """Returns whether the elements of a tensor are known to be distinct.

    ``inside`` are the calls in whose functions it is, the innermost last.
    """
    if _is_eager(tensor):
        return False
    if inside:
        *outer, (call, body) = inside
        for place, own in enumerate(body.inputs, len(call.inputs) - len(body.inputs)):
            if own is tensor:
                return _is_distinct(call.inputs[place], tuple(outer))
    op = tensor.op
    if op.type in _DISTINCT:
        return bool(tensor.value_index == _DISTINCT[op.type])
    if op.type in _KEEP:
        kept = op.inputs[0]
        return kept.dtype.is_integer and _is_distinct(kept, inside)
    if _counts_from_end(op):
        return _is_distinct(op.inputs[2], inside)
    bodies = functions_of(op)
    if bodies:
        outputs = [body.outputs[tensor.value_index] for body in bodies]
        return all(
            _is_distinct(own, (*inside, (op, body)))
            for own, body in zip(outputs, bodies, strict=True)
        )
    outside = captured_from(op.graph).get(id(tensor))
    return outside is not None and not inside and _is_distinct(outside)


def _counts_from_end(op: tf.Operation) -> bool:
    """Returns whether an op replaces negative indices, as Keras's ``take`` does."""
    if op.type != "SelectV2":
        return False
    is_negative, _, index = op.inputs
    return is_negative.op.type == "Less" and is_negative.op.inputs[0] is index

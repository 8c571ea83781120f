"""Adding ``IndexedSlices``: rows one after the other, or spread out dense.

The sum of sparse gradients is the list of all their rows: an index may come
twice and in any order. The optimizers of ``tf.compat.v1.train`` add such rows
themselves. Of Keras 3's ten do not (RMSprop, Adam, AdamW, Adadelta, Adagrad,
Adamax, Nadam, Ftrl, Adafactor, Lamb): ``tw_core.sum_duplicate_rows`` does it
for them, and for whoever else needs one row per index, as a norm does.
"""

from collections.abc import Sequence

import tensorflow as tf

from tw_reduce._reducer import Tensorlike, dense_part
from tw_reduce._widening import arrived


def add_rows(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Adds ``IndexedSlices`` without spreading them out.

    Args:
      slices: K of one dtype and dense shape; ``[R_k, ...]`` values each.

    Returns:
      One with the ``R_0 + ... + R_(K-1)`` rows of all, in the order of towers.
    """
    indices = [item.indices for item in slices]
    if len({index.dtype for index in indices}) > 1:
        indices = [tf.cast(index, tf.int64) for index in indices]
    shaped = [item for item in slices if item.dense_shape is not None]
    known = [item for item in shaped if item.shape.is_fully_defined()]
    best = next(iter([*known, *shaped]), None)
    return tf.IndexedSlices(
        tf.concat([arrived(item.values) for item in slices], axis=0),
        tf.concat(indices, axis=0),
        None if best is None else best.dense_shape,
    )


def to_dense(tensor: Tensorlike, *, num_rows: int | tf.Tensor) -> tf.Tensor:
    """Spreads an ``IndexedSlices`` out, rows of one index added; else itself.

    Args:
      tensor: dense or sparse.
      num_rows: the first dimension of the dense shape.
    """
    if not isinstance(tensor, tf.IndexedSlices):
        return tensor
    return tf.math.unsorted_segment_sum(tensor.values, tensor.indices, num_rows)


def densify_column(column: Sequence[Tensorlike], *, caller: str) -> list[tf.Tensor]:
    """Spreads the sparse tensors of a column out, each on its own device.

    Args:
      column: K tensors for one variable.
      caller: who asks; opens the message.

    Raises:
      ValueError: all are ``IndexedSlices`` without ``dense_shape``.
    """
    if not any(isinstance(tensor, tf.IndexedSlices) for tensor in column):
        return list(column)
    num_rows = num_dense_rows(column, caller=caller)
    dense = []
    for tensor in column:
        with tf.device(dense_part(tensor).device):
            dense.append(to_dense(tensor, num_rows=num_rows))
    return dense


def num_dense_rows(column: Sequence[Tensorlike], *, caller: str) -> int | tf.Tensor:
    """Finds the first dimension that the dense sum of a column has.

    Args:
      column: K tensors for one variable.
      caller: who asks; opens the message.

    Raises:
      ValueError: all are ``IndexedSlices`` without ``dense_shape``.
    """
    for tensor in column:
        if tensor.shape.rank is not None and tensor.shape[0] is not None:
            return int(tensor.shape[0])
    for tensor in column:
        if not isinstance(tensor, tf.IndexedSlices):
            return tf.shape(tensor)[0]
        if tensor.dense_shape is not None:
            return tensor.dense_shape[0]
    raise ValueError(
        f"{caller}: an IndexedSlices must become dense here, but no tower's has a "
        "dense_shape. Give it one, or take a reducer that keeps it sparse, such as "
        "sum_balanced."
    )

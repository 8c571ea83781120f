"""Adds the towers' tensors of each variable on one device each, always alike.

A sum must have the same bits in every run. TensorFlow's memory pass would
rewrite an ``AddN`` of three and more inputs into one accumulation per input,
in whatever order they finish, wherever it believes a device's memory to be
four fifths used; a CPU device claims 256 MB, so that every large model is hit,
and takes twice the time. The pass leaves alone what it cannot infer the shape
of. So the tensors are added under a shape that only the run knows: flat, by a
``[-1]`` that no pass folds. ``docs/design/reduce.md`` has the measurements.
"""

from collections.abc import Sequence

import tensorflow as tf

from tw_core import compiles_with_xla
from tw_reduce._devices import host_of
from tw_reduce._reducer import Tensorlike
from tw_reduce._sums.sparse import add_rows, num_dense_rows, to_dense
from tw_reduce._widening import arrived


def add_columns(
    columns: Sequence[Sequence[Tensorlike]], devices: Sequence[str | None]
) -> list[Tensorlike]:
    """Adds each column on the device beside it.

    What was widened (float16 cast to float32, say) travels narrow.

    Args:
      columns: [N][K] tensors; each column of one dtype and shape. All sparse:
        rows are put one after the other, duplicates stay. Dense and sparse
        mixed: the sum is dense.
      devices: [N] where to add; None for wherever the caller's scope says.

    Returns:
      [N] sums, each on its device; a column of one tensor is returned as it is.
    """
    flat_shapes: dict[str, tf.Tensor | None] = {}
    sums = []
    for column, device in zip(columns, devices, strict=True):
        if len(column) == 1:
            sums.append(column[0])
            continue
        host = host_of(device)
        if host not in flat_shapes:
            flat_shapes[host] = _flat_shape(host)
        with tf.device(device):
            sums.append(_add(column, flat_shapes[host]))
    return sums


def _flat_shape(host: str) -> tf.Tensor | None:
    # No memory pass runs eagerly or in what XLA compiles, and XLA refuses Unique.
    if tf.executing_eagerly() or compiles_with_xla():
        return None
    # Constant folding stops at the placeholder, shape inference at Unique.
    with tf.device(host):
        hidden = tf.raw_ops.PlaceholderWithDefault(input=[-1], shape=[1])
        return tf.raw_ops.Unique(x=hidden).y


def _add(column: Sequence[Tensorlike], flat_shape: tf.Tensor | None) -> Tensorlike:
    sparse = [tensor for tensor in column if isinstance(tensor, tf.IndexedSlices)]
    if len(sparse) == len(column):
        return add_rows(sparse)
    dense = list(column)
    if sparse:
        num_rows = num_dense_rows(column, caller="add_columns")
        dense = [to_dense(tensor, num_rows=num_rows) for tensor in column]
    if flat_shape is None:
        return tf.add_n(dense)
    return _add_dense([arrived(tensor) for tensor in dense], flat_shape)


def _add_dense(tensors: Sequence[tf.Tensor], flat_shape: tf.Tensor) -> tf.Tensor:
    shape = _merged_shape(tensors)
    if shape.is_fully_defined():
        flat = [tf.reshape(tensor, flat_shape) for tensor in tensors]
        return tf.reshape(tf.raw_ops.AddN(inputs=flat), shape)
    # Not flat: AddN itself must see a difference that only the run can show.
    hidden = [
        tf.reshape(tensor, tf.slice(tf.shape(tensor), [0], flat_shape))
        for tensor in tensors
    ]
    return tf.ensure_shape(tf.raw_ops.AddN(inputs=hidden), shape)


def _merged_shape(column: Sequence[Tensorlike]) -> tf.TensorShape:
    shape = tf.TensorShape(None)
    for tensor in column:
        shape = shape.merge_with(tensor.shape)
    return shape

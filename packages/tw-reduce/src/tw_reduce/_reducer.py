"""What a reducer takes and returns, K lists of N tensors, and how these travel.

A reducer is any callable ``[K][N] -> [K][N]``.

A cast to a wider floating dtype is exact, so it may as well be made where the
tensor is used; then half the bytes cross between the devices. The first cast
is left without a user, and TensorFlow prunes it.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from tw_core.gradients import map_values, values_of

Tensorlike: TypeAlias = tf.Tensor | tf.IndexedSlices
"""A dense or a sparse gradient; None is refused before any algorithm."""

TowerTensors: TypeAlias = Sequence[Sequence[Tensorlike]]
"""[K][N]: tower k's tensor for variable n."""

Reducer: TypeAlias = Callable[[TowerTensors], list[list[Tensorlike]]]
"""Adds over all towers; every tower gets the sums."""

HALF_DTYPES = (tf.float16, tf.bfloat16)


def columns(grads: TowerTensors) -> list[tuple[Tensorlike, ...]]:
    """Turns [K][N] into [N][K]: the towers' tensors for each variable."""
    return list(zip(*grads, strict=True))


def rows(
    columns: Sequence[Sequence[Tensorlike]], num_towers: int
) -> list[list[Tensorlike]]:
    """Turns [N][K] back into [K][N], also where N is 0."""
    return [[column[k] for column in columns] for k in range(num_towers)]


def map_dense(fn: Callable[[tf.Tensor], tf.Tensor], tensor: Tensorlike) -> Tensorlike:
    """As ``map_values``, on the tensor's own device."""
    with tf.device(values_of(tensor).device):
        return map_values(fn, tensor)


def map_results(
    fn: Callable[[Tensorlike, Tensorlike], Tensorlike],
    results: TowerTensors,
    grads: TowerTensors,
) -> list[list[Tensorlike]]:
    """Changes [K][N] results, those that towers share only once.

    Args:
      fn: takes a result and a gradient that it is the result of.
      results: [K][N].
      grads: [K][N], reduced to ``results``.
    """
    changed: dict[int, Tensorlike] = {}
    for row, tower in zip(results, grads, strict=True):
        for result, grad in zip(row, tower, strict=True):
            if id(result) not in changed:
                changed[id(result)] = fn(result, grad)
    return [[changed[id(result)] for result in row] for row in results]


def static_shape(tensor: Tensorlike) -> tf.TensorShape | None:
    """Returns the shape of the dense array, as far as it is known while building.

    Returns:
      Of an ``IndexedSlices`` what its rows and its ``dense_shape`` say; None if
      they contradict each other.
    """
    if not isinstance(tensor, tf.IndexedSlices):
        return tensor.shape
    own_rows = tf.TensorShape([None]).concatenate(tensor.values.shape[1:])
    return merged_shape([tensor.shape, own_rows])


def merged_shape(shapes: Sequence[tf.TensorShape | None]) -> tf.TensorShape | None:
    """Combines what several shapes know of one; None if they contradict."""
    merged = tf.TensorShape(None)
    for shape in shapes:
        if shape is None or not merged.is_compatible_with(shape):
            return None
        merged = merged.merge_with(shape)
    return merged


def narrow_source(tensor: tf.Tensor) -> tf.Tensor:
    """Returns what a tensor was exactly widened from; else the tensor itself.

    Args:
      tensor: dense; any dtype.

    Returns:
      The input of the floating cast that made ``tensor``, if that cast widened
      it in the graph that is being built.
    """
    if tf.executing_eagerly() or tensor.graph is not tf.compat.v1.get_default_graph():
        return tensor
    if tensor.op.type != "Cast":
        return tensor
    source = tensor.op.inputs[0]
    widened = source.dtype.is_floating and source.dtype.size < tensor.dtype.size
    return source if widened and tensor.dtype.is_floating else tensor


def arrived(tensor: tf.Tensor) -> tf.Tensor:
    """Repeats an exact widening cast here; else returns the tensor itself."""
    return tf.cast(narrow_source(tensor), tensor.dtype)


def join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins dense tensors of one dtype, in their order, into one of rank 1.

    If all were widened from one dtype, they are joined first and widened then.
    """
    narrow = [narrow_source(tensor) for tensor in tensors]
    if len({tensor.dtype for tensor in narrow}) > 1:
        narrow = list(tensors)
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in narrow], axis=0)
    return tf.cast(flat, tensors[0].dtype)


def cut(flat: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Cuts a flat tensor at the tensors' boundaries.

    Args:
      flat: [sum of elements].
      shapes: fully known, in the order in which the tensors were joined.

    Returns:
      One tensor per shape.
    """
    sizes = [shape.num_elements() for shape in shapes]
    parts = tf.split(flat, sizes)
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]

"""Shapes that only the run knows, compared in the run; the only such comparison.

Shapes that TensorFlow knows while building are compared there and cost the step
nothing. Unknown ones, such as those of a fed tensor or a batch of any size, could
silently give wrong sums: tensors are added flat, and packs are cut at tower 0's
boundaries. Those shapes, and only those, are compared when the step runs: with the
variable's shape where it is known, else tower with tower.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core.checks import caller
from tw_core.devices import host_of
from tw_core.gradients._values import map_values, narrow_source, values_of
from tw_core.modes import compiles_with_xla


def ensured(grad: Any, variable: tf.Variable, *, tower: int) -> Any:
    """Gives a gradient its variable's shape; an unknown one passes an EnsureShape."""
    if grad is None:
        return None
    shape = variable.shape
    if isinstance(grad, tf.IndexedSlices):
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    name = f"check_gradient_shape/tower{tower}/{variable.name.split(':')[0]}"

    def ensure(tensor: tf.Tensor) -> tf.Tensor:
        if str(tensor.shape.merge_with(shape)) == str(tensor.shape):
            return tensor  # The variable's shape adds nothing.
        # On the gradient's device, whatever device is in scope.
        with tf.device(tensor.device or None):
            return tf.ensure_shape(
                tensor, shape, name=re.sub(r"[^A-Za-z0-9_.\\/-]", "_", name)
            )

    return map_values(ensure, grad)


def compared(
    grads: Sequence[Sequence[Any]],
) -> tuple[list[list[Any]], list[tf.Operation]]:
    """Compares [K][N] gradients tower with tower where a shape is unknown.

    Those wait for the comparison, and get the merged static shape. Returns them, and
    the comparisons, which fail the step.
    """
    columns: list[Sequence[Any]] = list(zip(*grads, strict=True))
    tests: list[tf.Operation] = []
    for n, column in enumerate(columns):
        if len(grads) > 1 and not all(map(_is_known, column)):
            columns[n] = _compared(column, f"{caller()}: position {n}", tests)
    return [[column[k] for column in columns] for k in range(len(grads))], tests


def static_shape(
    grad: Any, num_rows: tf.TensorShape | None = None
) -> tf.TensorShape | None:
    """Returns the dense shape as known while building; None if it is contradictory.

    ``num_rows`` is the shape of a sparse gradient's first axis if it does not say.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return tf.TensorShape(grad.shape)
    whole, given = tf.TensorShape(None), grad.dense_shape
    if given is not None:  # a list, where the user made it so
        whole = grad.shape if tf.is_tensor(given) else tf.TensorShape(list(given))
    first = (
        tf.TensorShape([None]) if num_rows is None or given is not None else num_rows
    )
    rows = first.concatenate(tf.TensorShape(grad.values.shape)[1:])
    return merged_shape([whole, rows])


def merged_shape(shapes: Sequence[tf.TensorShape | None]) -> tf.TensorShape | None:
    """Merges the known dimensions of several shapes; None if they contradict."""
    merged = tf.TensorShape(None)
    for shape in shapes:
        if shape is None or not merged.is_compatible_with(shape):
            return None
        merged = merged.merge_with(shape)
    return merged


def _is_known(grad: Any) -> bool:
    if isinstance(grad, tf.IndexedSlices):
        rows_known = grad.values.shape[1:].is_fully_defined()
        no_dense_shape = grad.dense_shape is None
        return rows_known and (no_dense_shape or grad.shape.is_fully_defined())
    return bool(grad.shape.is_fully_defined())


def _compared(column: Sequence[Any], who: str, tests: list[tf.Operation]) -> list[Any]:
    shape = merged_shape([static_shape(grad) for grad in column])
    dense = [values_of(grad) for grad in column]
    with tf.name_scope("same_shapes"):
        if compiles_with_xla():  # which knows all shapes when it compiles
            return [_of_shape(grad, shape, tf.ensure_shape) for grad in column]
        refusal = (
            f"{who} must have one shape over all towers; check that every tower lists "
            "its variables in the same order. Tensors "
            f"{', '.join(tensor.name for tensor in dense)} came with"
        )
        named_shapes = _run_time_shapes(column)
        with tf.device(host_of(dense[0].device)):
            test = tf.raw_ops.Assert(
                condition=_all_alike([shape for _, shape in named_shapes]),
                data=[refusal, *(item for pair in named_shapes for item in pair)],
                summarize=16,
            )
        tests.append(test)
        with tf.control_dependencies([test]):
            return [_of_shape(grad, shape, _wait) for grad in column]


def _of_shape(
    grad: Any,
    shape: tf.TensorShape,
    settle: Callable[[tf.Tensor, tf.TensorShape], tf.Tensor],
) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    with tf.device(values_of(grad).device):
        return map_values(lambda dense: settle(dense, shape), grad)


def _wait(dense: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    # A widened tensor waits in its narrow dtype, so that it can travel in it.
    waited = tf.cast(tf.identity(narrow_source(dense)), dense.dtype)
    waited.set_shape(shape)
    return waited


def _run_time_shapes(column: Sequence[Any]) -> list[tuple[str, tf.Tensor]]:
    """Lists int64 shapes, -1 for any size, each with its name for the message."""
    whole, of_rows = [], []
    for k, grad in enumerate(column):
        with tf.device(values_of(grad).device):
            shape = tf.shape(values_of(grad), tf.int64)
            if not isinstance(grad, tf.IndexedSlices):
                whole.append((f"tower {k}:", shape))
                continue
            if grad.dense_shape is not None:
                whole.append((f"tower {k}:", tf.cast(grad.dense_shape, tf.int64)))
            any_number = tf.constant([-1], tf.int64)
            rows_of = tf.concat([any_number, shape[1:]], axis=0)
            of_rows.append((f"rows of tower {k}:", rows_of))
    return whole + of_rows  # the first, with which all are compared, is complete


def _all_alike(shapes: Sequence[tf.Tensor]) -> tf.Tensor:
    if len({shape.shape[0] for shape in shapes}) > 1 or shapes[0].shape[0] is None:
        sizes = [tf.size(shape) for shape in shapes]
        longest = tf.reduce_max(tf.stack(sizes))
        shapes = [
            tf.pad(shape, [[0, longest - size]], constant_values=-2)
            for shape, size in zip(shapes, sizes, strict=True)
        ]
    table = tf.stack(shapes)
    alike = tf.equal(table, table[0]) | tf.equal(table, -1)
    return tf.reduce_all(alike)

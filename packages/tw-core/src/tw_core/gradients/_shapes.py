"""Shapes and dtypes of gradients, compared at build time and at run time.

Shapes that TensorFlow knows at build time are compared then and cost the step nothing.
Unknown ones, such as those of a fed tensor or a batch of any size, could silently give
wrong sums: tensors are added flat, and packs are cut at tower 0's boundaries. Those
shapes, and only those, are compared when the step runs: with the variable's shape if it
is known, else between towers.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tw_core._flat_packs import narrow_source
from tw_core._modes import compiles_with_xla
from tw_core.devices._logical import host_of
from tw_core.gradients._values import map_values, values_of


def ensured(
    grads: Sequence[Any], variables: Sequence[tf.Variable], *, tower: int
) -> list[Any]:
    """Gives [N] gradients their variables' shapes, by an EnsureShape if unknown."""
    return [
        _ensured(grad, variable, tower)
        for grad, variable in zip(grads, variables, strict=True)
    ]


def _ensured(grad: Any, variable: tf.Variable, tower: int) -> Any:
    if grad is None:
        return None
    is_sparse = isinstance(grad, tf.IndexedSlices)
    dense, shape = grad, variable.shape
    if is_sparse:
        dense, shape = grad.values, tf.TensorShape([None]).concatenate(shape[1:])
    if str(dense.shape.merge_with(shape)) == str(dense.shape):
        return grad  # The variable's shape adds nothing.
    name = f"check_gradient_shape/tower{tower}/{variable.name.split(':')[0]}"
    # On the gradient's device, not on the one in scope.
    with tf.device(dense.device or None):
        dense = tf.ensure_shape(
            dense, shape, name=re.sub(r"[^A-Za-z0-9_.\\/-]", "_", name)
        )
    if not is_sparse:
        return dense
    return tf.IndexedSlices(dense, grad.indices, grad.dense_shape)


def compared(
    grads: Sequence[Sequence[Any]],
) -> tuple[list[list[Any]], list[tf.Operation]]:
    """Compares [K][N] gradients between towers where a shape is unknown.

    Those wait for the comparison, and get the merged static shape. Returns them, and
    the comparisons, which fail the step if shapes differ.
    """
    columns: list[Sequence[Any]] = list(zip(*grads, strict=True))
    tests: list[tf.Operation] = []
    for n, column in enumerate(columns):
        if len(grads) > 1 and not all(map(_is_known, column)):
            columns[n] = _compared(column, f"The gradients at position {n}", tests)
    return [[column[k] for column in columns] for k in range(len(grads))], tests


def differences(
    grads: Sequence[Sequence[Any]],
    names: Sequence[str],
    variables: Sequence[Sequence[tf.Variable]] | None = None,
) -> list[str]:
    """Describes how a variable's [K] gradients differ from each other or from it."""
    kept = [()] * len(names) if variables is None else zip(*variables, strict=True)
    return [
        f"{name}{difference}"
        for name, column, own in zip(names, zip(*grads, strict=True), kept, strict=True)
        for difference in _differences_of(column, own)
    ]


def _differences_of(
    grads: Sequence[Any], variables: Sequence[tf.Variable]
) -> Iterator[str]:
    where = f"in towers 0..{len(grads) - 1}"
    of_variable, kept_in = "", [v.shape for v in variables]
    num_rows = kept_in[0][:1] if variables and kept_in[0].rank != 0 else None
    shapes = [
        kept_in[k] if grad is None else _static_shape(grad, num_rows)
        for k, grad in enumerate(grads)
    ]
    if variables:
        of_variable = f", of shape {kept_in[0]},"
    is_sparse = any(isinstance(grad, tf.IndexedSlices) for grad in grads)
    merged = _merged([*kept_in[:1], *shapes])
    if merged is None or (is_sparse and merged.rank == 0):
        found = [_described(*both) for both in zip(grads, shapes, strict=True)]
        yield f"{of_variable} has gradients of shapes {found} {where}"
    elif _merged(kept_in) is None:
        yield f" has shapes {[str(other) for other in kept_in]} {where}"
    kept_as = [v.dtype.name for v in variables]
    if len(set(kept_as)) > 1:
        yield f" has dtypes {kept_as} {where}"
    kinds = [
        tf.as_dtype(variables[k].dtype if grad is None else grad.dtype)
        for k, grad in enumerate(grads)
    ]
    dtypes = [dtype.name for dtype in kinds]
    if len(set(dtypes)) > 1 and dtypes != kept_as:
        yield f" has gradients of dtypes {dtypes} {where}"
    elif not all(map(_may_update, kinds, variables)):
        yield f", of dtype {kept_as[0]}, has gradients of dtypes {dtypes} {where}"


def _described(grad: Any, shape: tf.TensorShape | None) -> str:
    if shape is not None:
        return str(shape)
    return f"{grad.shape} of rows {grad.values.shape[1:]}"


def _may_update(dtype: tf.DType, variable: tf.Variable) -> bool:
    # TensorFlow's optimizers cast complex gradients, and drop the imaginary part.
    if dtype.is_complex:
        return bool(variable.dtype.is_complex)
    return bool(dtype.is_floating or dtype.is_integer)


def _static_shape(
    grad: Any, num_rows: tf.TensorShape | None = None
) -> tf.TensorShape | None:
    """Returns the dense shape as known at build time; None if it is contradictory.

    ``num_rows`` is the shape of the first axis of a sparse gradient that lacks one.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return tf.TensorShape(grad.shape)
    whole, given = tf.TensorShape(None), grad.dense_shape
    if given is not None:  # may be a list that the user passed
        whole = grad.shape if tf.is_tensor(given) else tf.TensorShape(list(given))
    first = (
        tf.TensorShape([None]) if num_rows is None or given is not None else num_rows
    )
    rows = first.concatenate(tf.TensorShape(grad.values.shape)[1:])
    return _merged([whole, rows])


def _merged(shapes: Sequence[tf.TensorShape | None]) -> tf.TensorShape | None:
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
    shape = _merged([_static_shape(grad) for grad in column])
    dense = [values_of(grad) for grad in column]
    with tf.name_scope("same_shapes"):
        if compiles_with_xla():  # which knows all shapes when it compiles
            return [_of_shape(grad, shape, tf.ensure_shape) for grad in column]
        refusal = (
            f"{who} must have one shape over all towers; check that every tower lists "
            "its variables in the same order. Tensors "
            f"{', '.join(tensor.name for tensor in dense)} had shapes"
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
    # A widened tensor waits in its narrow dtype, so that it can be sent in it.
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
    ranks = {tf.compat.dimension_value(shape.shape[0]) for shape in shapes}
    if len(ranks) > 1 or None in ranks:
        sizes = [tf.size(shape) for shape in shapes]
        longest = tf.reduce_max(tf.stack(sizes))
        shapes = [
            tf.pad(shape, [[0, longest - size]], constant_values=-2)
            for shape, size in zip(shapes, sizes, strict=True)
        ]
    table = tf.stack(shapes)
    alike = tf.equal(table, table[0]) | tf.equal(table, -1)
    return tf.reduce_all(alike)

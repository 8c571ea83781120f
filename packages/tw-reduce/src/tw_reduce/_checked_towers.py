"""Checks a reducer's input once: while it is built and, where needed, in the run.

Shapes that TensorFlow knows while building are compared there and cost the step
nothing. Unknown ones, such as those of a fed tensor or a batch of any size, could
silently give wrong sums: tensors are added flat, and packs are cut at tower 0's
boundaries. Those shapes, and only those, are compared when the step runs.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tw_core.checks import caller
from tw_core.devices import host_of
from tw_core.gradients import values_of
from tw_core.modes import compiles_with_xla
from tw_reduce._checks import ADDABLE, check_addable, refuse_unaddable
from tw_reduce._reducer import (
    Tensorlike,
    TowerTensors,
    columns,
    map_dense,
    merged_shape,
    narrow_source,
    rows,
    static_shape,
)


class CheckedTowers(list[list[Tensorlike]]):
    """[K][N] tensors that were checked, so that inner reducers need not do so."""

    def __init__(
        self,
        towers: Sequence[list[Tensorlike]],
        tests: Sequence[tf.Operation] = (),
    ) -> None:
        super().__init__(towers)
        self.tests = tuple(tests)  # comparisons in the run, which fail the step


def checked_towers(grads: TowerTensors) -> CheckedTowers:
    """Refuses what no reducer can add, and compares unknown shapes in the run.

    Gradients that another reducer has checked are returned as they are.
    """
    if isinstance(grads, CheckedTowers):
        return grads
    refuse_unaddable(grads)
    return compared_towers(grads)


def compared_towers(
    grads: TowerTensors, *, names: Sequence[str] | None = None
) -> CheckedTowers:
    """Compares unknown shapes in the run; ``refuse_unaddable`` must have passed.

    Tensors of unknown shape wait for the comparison, and get the merged static shape.
    """
    by_variable: list[Sequence[Tensorlike]] = list(columns(grads))
    tests: list[tf.Operation] = []
    for n, column in enumerate(by_variable):
        if len(grads) > 1 and not all(map(_is_known, column)):
            name = "" if names is None else f" ({names[n]})"
            by_variable[n] = _compared(column, f"{caller()}: position {n}{name}", tests)
    return CheckedTowers(rows(by_variable, len(grads)), tests)


def addable_towers(
    grads: TowerTensors, *, dtypes: Sequence[str] = ADDABLE
) -> CheckedTowers:
    """As ``checked_towers``; also refuses dtypes that cannot be added."""
    checked = checked_towers(grads)
    check_addable(checked, dtypes=dtypes)
    return checked


def with_shape(tensor: tf.Tensor, shape: tf.TensorShape, *, refusal: str) -> tf.Tensor:
    """Sets the shape that a dense tensor must have, which the run compares.

    The tensor's own shape is compatible with ``shape``, which is fully known; a tensor
    of known shape is returned as it is. ``refusal`` opens the error.
    """
    if tensor.shape.is_fully_defined():
        return tensor
    if compiles_with_xla():
        return tf.ensure_shape(tensor, shape)
    wanted = tf.constant(shape.as_list(), tf.int64)
    shapes = [("wanted:", wanted), ("got:", tf.shape(tensor, tf.int64))]
    test = _compare_shapes(shapes, refusal=refusal, device=tensor.device)
    with tf.control_dependencies([test]), tf.device(tensor.device):
        return _wait(tensor, shape)


def _compare_shapes(
    shapes: Sequence[tuple[str, tf.Tensor]], *, refusal: str, device: str
) -> tf.Operation:
    """Returns an op that fails the step if shapes differ.

    All are compared with the first, on the host of ``device``. They are int64 vectors,
    -1 for any size, each with a name for the message, which starts with ``refusal``.
    """
    with tf.device(host_of(device)):
        named_shapes = [item for pair in shapes for item in pair]
        return tf.raw_ops.Assert(
            condition=_all_alike([shape for _, shape in shapes]),
            data=[refusal, *named_shapes],
            summarize=16,
        )


def _is_known(tensor: Tensorlike) -> bool:
    if isinstance(tensor, tf.IndexedSlices):
        rows_known = tensor.values.shape[1:].is_fully_defined()
        no_dense_shape = tensor.dense_shape is None
        return rows_known and (no_dense_shape or tensor.shape.is_fully_defined())
    return bool(tensor.shape.is_fully_defined())


def _compared(
    column: Sequence[Tensorlike], who: str, tests: list[tf.Operation]
) -> list[Tensorlike]:
    shape = merged_shape([static_shape(tensor) for tensor in column])
    dense = [values_of(tensor) for tensor in column]
    with tf.name_scope("same_shapes"):
        if compiles_with_xla():  # which knows all shapes when it compiles
            return [_of_shape(tensor, shape, tf.ensure_shape) for tensor in column]
        refusal = (
            f"{who} must have one shape over all towers; check that every tower lists "
            "its variables in the same order. Tensors "
            f"{', '.join(tensor.name for tensor in dense)} came with"
        )
        test = _compare_shapes(
            _run_time_shapes(column), refusal=refusal, device=dense[0].device
        )
        tests.append(test)
        with tf.control_dependencies([test]):
            return [_of_shape(tensor, shape, _wait) for tensor in column]


def _of_shape(
    tensor: Tensorlike,
    shape: tf.TensorShape,
    settle: Callable[[tf.Tensor, tf.TensorShape], tf.Tensor],
) -> Tensorlike:
    if isinstance(tensor, tf.IndexedSlices):
        shape = tf.TensorShape([None]).concatenate(shape[1:])
    return map_dense(lambda dense: settle(dense, shape), tensor)


def _wait(dense: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    # A widened tensor waits in its narrow dtype, so that it can travel in it.
    waited = tf.cast(tf.identity(narrow_source(dense)), dense.dtype)
    waited.set_shape(shape)
    return waited


def _run_time_shapes(column: Sequence[Tensorlike]) -> list[tuple[str, tf.Tensor]]:
    whole, of_rows = [], []
    for k, tensor in enumerate(column):
        with tf.device(values_of(tensor).device):
            shape = tf.shape(values_of(tensor), tf.int64)
            if not isinstance(tensor, tf.IndexedSlices):
                whole.append((f"tower {k}:", shape))
                continue
            if tensor.dense_shape is not None:
                whole.append((f"tower {k}:", tf.cast(tensor.dense_shape, tf.int64)))
            any_number = tf.constant([-1], tf.int64)
            rows_of = tf.concat([any_number, shape[1:]], axis=0)
            of_rows.append((f"rows of tower {k}:", rows_of))
    return whole + of_rows  # the first, with which all are compared, is complete


def _all_alike(shapes: Sequence[tf.Tensor]) -> tf.Tensor:
    if len({shape.shape[0] for shape in shapes}) > 1 or shapes[0].shape[0] is None:
        shapes = _of_one_length(shapes)
    table = tf.stack(shapes)
    alike = tf.equal(table, table[0]) | tf.equal(table, -1)
    return tf.reduce_all(alike)


def _of_one_length(shapes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    sizes = [tf.size(shape) for shape in shapes]
    longest = tf.reduce_max(tf.stack(sizes))
    return [
        tf.pad(shape, [[0, longest - size]], constant_values=-2)
        for shape, size in zip(shapes, sizes, strict=True)
    ]

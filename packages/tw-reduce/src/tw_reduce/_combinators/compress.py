"""Sending gradients in fewer bits, or adding them in another dtype.

Two different things: ``cast_during`` rounds what travels and adds in the
gradient's own dtype; ``reduce_as`` also adds in the other dtype, which is what
a library that adds while it sends (NCCL, collectives) needs.
"""

from dataclasses import dataclass
from functools import partial

import tensorflow as tf

from tw_core import without_autograph
from tw_core.checks import check_function
from tw_reduce._checked_towers import CheckedTowers, checked_towers
from tw_reduce._combinators.combinator import Around
from tw_reduce._reducer import (
    HALF_DTYPES,
    Reducer,
    Tensorlike,
    TowerTensors,
    check_reduced,
    map_dense,
)


def cast_during(reducer: Reducer, dtype: tf.DType) -> Reducer:
    """Makes a reducer whose gradients travel as ``dtype`` and add as they came.

    Each gradient is rounded to ``dtype`` on its tower's device and widened
    where it is added: by the one-device, round-robin, balanced and hierarchical
    sums (within groups). Around reducers that add while they send, values are
    rounded alike and nothing travels narrower. Put ``packed`` outside or
    inside. float16 overflows above 65,504; bfloat16 does not, with 8 bits.

    Args:
      reducer: [K][N] -> [K][N].
      dtype: ``tf.float16`` or ``tf.bfloat16``.

    Returns:
      A reducer; its results have the gradients' own dtypes and are not
      rounded. Gradients that are no wider floats than ``dtype`` pass as they
      are; of sparse ones the values are rounded.

    Raises:
      TypeError: ``reducer`` is no function, or ``dtype`` no dtype.
      ValueError: ``dtype`` is not a floating dtype; when called, ``reducer``
        returns another shape of list.
    """
    check_function("cast_during", reducer=reducer)
    wire = _check_floating(dtype, caller="cast_during")
    return Around(reducer, partial(_reduce_rounded, wire))


def reduce_as(reducer: Reducer, dtype: tf.DType) -> Reducer:
    """Makes a reducer that adds in ``dtype`` and gives back the own dtypes.

    Args:
      reducer: [K][N] -> [K][N]; sees floating gradients as ``dtype``.
      dtype: a floating dtype, narrower (fewer bytes, rounded sums) or wider
        (e.g. float32 sums of float16 gradients).

    Returns:
      A reducer; integers pass as they are; of sparse ones the values are cast.

    Raises:
      TypeError: ``reducer`` is no function, or ``dtype`` no dtype.
      ValueError: ``dtype`` is not a floating dtype; when called, ``reducer``
        returns another shape of list.
    """
    check_function("reduce_as", reducer=reducer)
    inner = _check_floating(dtype, caller="reduce_as")
    return ReducesAs(reducer, inner)


@dataclass(frozen=True, eq=False)
class ReducesAs:
    """What ``reduce_as`` makes.

    Attributes:
      inner: adds.
      dtype: what ``inner`` adds floating gradients in.
      divides: whether the result is the mean: gradients are divided before
        they are cast, since their sum may be out of the dtype's range.
    """

    inner: Reducer
    dtype: tf.DType
    divides: bool = False

    @without_autograph
    def __call__(self, grads: TowerTensors) -> list[list[Tensorlike]]:
        """Reduces [K][N] gradients."""
        grads = checked_towers(grads, caller="reduce_as")
        parts = len(grads) if self.divides else 1
        with tf.name_scope("reduce_as"):
            cast = CheckedTowers(
                (
                    [
                        _cast_float(_divide(tensor, parts), self.dtype)
                        for tensor in tower
                    ]
                    for tower in grads
                ),
                grads.tests,
            )
        sums = self.inner(cast)
        check_reduced(sums, grads, caller="reduce_as")
        return _cast_back(sums, grads)


def _reduce_rounded(
    wire: tf.DType, reducer: Reducer, grads: TowerTensors
) -> list[list[Tensorlike]]:
    grads = checked_towers(grads, caller="cast_during")
    with tf.name_scope("cast_during"):
        rounded = CheckedTowers(
            ([_round(tensor, wire) for tensor in tower] for tower in grads),
            grads.tests,
        )
    sums = reducer(rounded)
    check_reduced(sums, grads, caller="cast_during")
    return sums


def _cast_back(
    sums: list[list[Tensorlike]], grads: TowerTensors
) -> list[list[Tensorlike]]:
    unique = {
        id(total): (total, like.dtype)
        for row, tower in zip(sums, grads, strict=True)
        for total, like in zip(row, tower, strict=True)
    }
    with tf.name_scope("reduce_as"):
        back = {key: _cast_float(total, own) for key, (total, own) in unique.items()}
    return [[back[id(total)] for total in row] for row in sums]


def _round(tensor: Tensorlike, wire: tf.DType) -> Tensorlike:
    if not tensor.dtype.is_floating or tensor.dtype.size <= wire.size:
        return tensor
    return map_dense(lambda dense: tf.cast(tf.cast(dense, wire), dense.dtype), tensor)


def _divide(tensor: Tensorlike, parts: int) -> Tensorlike:
    if parts == 1:
        return tensor
    wide = tf.float32 if tensor.dtype in HALF_DTYPES else tensor.dtype
    factor = tf.constant(1.0 / parts, wide)
    return map_dense(lambda dense: tf.cast(dense, wide) * factor, tensor)


def _cast_float(tensor: Tensorlike, dtype: tf.DType) -> Tensorlike:
    if not tensor.dtype.is_floating or tensor.dtype == dtype:
        return tensor
    return map_dense(lambda dense: tf.cast(dense, dtype), tensor)


def _check_floating(dtype: tf.DType, *, caller: str) -> tf.DType:
    try:
        wanted = tf.as_dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{caller}: dtype must be a tf.DType; got {dtype!r}. Pass e.g. tf.bfloat16."
        ) from error
    if not wanted.is_floating:
        raise ValueError(
            f"{caller}: dtype must be floating; got {wanted.name}. Pass e.g. "
            "tf.bfloat16."
        )
    return wanted

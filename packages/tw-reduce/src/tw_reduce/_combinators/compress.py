"""Sending gradients in fewer bits, or adding them in another dtype.

Two different things: ``compress`` rounds gradients for the transfer and adds in their
own dtype; ``accumulate_as`` also adds in the other dtype, as needed by a library that
adds while it sends (NCCL, collectives).
"""

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from tw_core.internal import Gradients
from tw_reduce._checks import check_reducer
from tw_reduce._combinators.mean import Combinator
from tw_reduce._reducer import (
    HALF_DTYPES,
    Reducer,
    Tensorlike,
    cast_to,
    map_dense,
    map_results,
    reduced_by,
)


def compress(reducer: Reducer, dtype: tf.DType) -> Reducer:
    """Makes a reducer that sends gradients as ``dtype`` and adds them in their own.

    Each gradient is rounded to ``dtype`` on its tower's device and widened
    where it is added: by the one-device, round-robin, balanced and hierarchical
    sums (within groups). Around reducers that add while they send, values are
    rounded too, but no fewer bytes are sent. ``packed`` may be outside or
    inside. float16 overflows above 65,504; bfloat16 does not, but has only 8
    significant bits.

    Args:
      reducer: [K][N] -> [K][N].
      dtype: ``tf.float16`` or ``tf.bfloat16``.

    Returns:
      A reducer; its results have the gradients' own dtypes and are not
      rounded. Gradients that are not floats wider than ``dtype`` pass
      unchanged; of sparse ones the values are rounded.

    Raises:
      TypeError: ``reducer`` is not a function, or ``dtype`` not a dtype.
      ValueError: ``dtype`` is not a floating dtype; when called, ``reducer``
        returns a list of another shape.
    """
    check_reducer(reducer=reducer)
    wire = _floating(dtype)
    return Combinator("compress", reducer, partial(_reduce_rounded, wire))


def accumulate_as(reducer: Reducer, dtype: tf.DType) -> Reducer:
    """Makes a reducer that adds in ``dtype`` and returns the gradients' own dtypes.

    Args:
      reducer: [K][N] -> [K][N]; sees floating gradients as ``dtype``.
      dtype: a floating dtype, narrower (fewer bytes, rounded sums) or wider
        (e.g. float32 sums of float16 gradients).

    Returns:
      A reducer; integers pass unchanged; of sparse gradients the values are cast.

    Raises:
      TypeError: ``reducer`` is not a function, or ``dtype`` not a dtype.
      ValueError: ``dtype`` is not a floating dtype; when called, ``reducer``
        returns a list of another shape.
    """
    check_reducer(reducer=reducer)
    wide = _floating(dtype)
    move = partial(_reduce_cast, wide, lambda tensor, _: tensor)
    if wide != tf.float16:
        return Combinator("accumulate_as", reducer, move, commutes=False)
    # The sum may be out of float16's range where the mean is not.
    divided = partial(_reduce_cast, wide, _divide)
    return Combinator("accumulate_as", reducer, move, mean_move=divided)


# Graphs keep the combinators' original names as scopes, `reduce_as` and `cast_during`.
def _reduce_cast(
    dtype: tf.DType,
    prepare: Callable[[Tensorlike, int], Tensorlike],
    reducer: Reducer,
    grads: Gradients,
) -> list[list[Tensorlike]]:
    with tf.name_scope("reduce_as"):
        cast = [
            [_cast_float(prepare(tensor, len(grads)), dtype) for tensor in tower]
            for tower in grads
        ]
    sums = reduced_by(reducer, Gradients(cast, tests=grads.tests))
    with tf.name_scope("reduce_as"):
        return map_results(lambda own, like: _cast_float(own, like.dtype), sums, grads)


def _reduce_rounded(
    wire: tf.DType, reducer: Reducer, grads: Gradients
) -> list[list[Tensorlike]]:
    with tf.name_scope("cast_during"):
        rounded = [[_round(tensor, wire) for tensor in tower] for tower in grads]
    return reduced_by(reducer, Gradients(rounded, tests=grads.tests))


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
    return cast_to(tensor, dtype) if tensor.dtype.is_floating else tensor


def _floating(dtype: tf.DType) -> tf.DType:
    try:
        floating = tf.as_dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"dtype must be a tf.DType; got {dtype!r}. Pass e.g. tf.bfloat16."
        ) from error
    if not floating.is_floating:
        raise ValueError(
            f"dtype must be floating; got {floating.name}. Pass e.g. tf.bfloat16."
        )
    return floating

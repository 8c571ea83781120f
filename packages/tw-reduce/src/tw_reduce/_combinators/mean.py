"""Dividing a sum by the number of towers.

The multiplication costs a pass over every gradient. Where the loss or the
learning rate can take the factor 1/K instead, the plain sum is the faster mean.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import tensorflow as tf

from tw_core import without_autograph
from tw_core.checks import check_function
from tw_reduce._checked_towers import CheckedTowers, checked_towers
from tw_reduce._combinators.combinator import Around, Dealt
from tw_reduce._combinators.compress import ReducesAs
from tw_reduce._reducer import (
    HALF_DTYPES,
    Reducer,
    Tensorlike,
    TowerTensors,
    check_reduced,
    map_dense,
)


def mean(reducer: Reducer) -> Reducer:
    """Makes a reducer of sums into one of means over towers.

    Args:
      reducer: [K][N] -> [K][N] sums.

    Returns:
      A reducer that multiplies each sum by 1/K once, on the device where it
      lies, however many towers share it; inside ``packed`` and ``spread``, so
      that a pack is multiplied as one. Of a sparse sum the values are
      multiplied. One tower is returned as the reducer gave it.

      float16 and bfloat16 gradients are widened, added and multiplied in
      float32, and rounded once, to the mean: their sum may be out of range
      where the mean is not. They travel narrow to where they are added;
      collectives and NCCL, which add while they send, carry float32. Around
      ``reduce_as(reducer, tf.float16)`` the gradients are divided first.

    Raises:
      TypeError: ``reducer`` is no function; when called with integer gradients,
        which have no exact mean.
      ValueError: when ``reducer`` returns another shape of list.
    """
    check_function("mean", reducer=reducer)
    if isinstance(reducer, ReducesAs) and reducer.dtype == tf.float16:
        return Around(
            replace(reducer, divides=True), partial(_move_divisible, _as_it_is)
        )
    if isinstance(reducer, Around):
        return Around(mean(reducer.inner), partial(_move_divisible, reducer.move))
    return partial(_reduce_to_means, reducer)


def _as_it_is(reducer: Reducer, grads: TowerTensors) -> list[list[Tensorlike]]:
    return reducer(grads)


@without_autograph
def _move_divisible(
    move: Callable[[Reducer, TowerTensors], list[list[Tensorlike]]],
    reducer: Reducer,
    grads: TowerTensors,
) -> list[list[Tensorlike]]:
    grads = checked_towers(grads, caller="mean")
    check_divisible(grads, caller="mean")  # where positions are the caller's
    return move(reducer, grads)


@without_autograph
def _reduce_to_means(reducer: Reducer, grads: TowerTensors) -> list[list[Tensorlike]]:
    grads = checked_towers(grads, caller="mean")
    check_divisible(grads, caller="mean")
    halves = len(grads) > 1 and any(_is_half(tensor) for tensor in grads[0])
    if halves and isinstance(reducer, Dealt):
        # What they are dealt out by may be their dtype.
        means = {name: mean(inner) for name, inner in reducer.reducers.items()}
        return replace(reducer, reducers=means)(grads)
    sums = reducer(_widened(grads) if halves else grads)
    check_reduced(sums, grads, caller="mean")
    return sums if len(grads) == 1 else _scale_all(sums, grads)


def _is_half(tensor: Tensorlike) -> bool:
    return tensor.dtype in HALF_DTYPES


def _widen(tensor: Tensorlike) -> Tensorlike:
    if not _is_half(tensor):
        return tensor
    return map_dense(lambda dense: tf.cast(dense, tf.float32), tensor)


def _widened(grads: CheckedTowers) -> CheckedTowers:
    """Casts float16 and bfloat16 to float32, which reducers undo for the transfer."""
    with tf.name_scope("mean"):
        return CheckedTowers(
            ([_widen(tensor) for tensor in tower] for tower in grads), grads.tests
        )


def _scale_all(
    sums: list[list[Tensorlike]], grads: TowerTensors
) -> list[list[Tensorlike]]:
    unique = {
        id(total): (total, like)
        for row, tower in zip(sums, grads, strict=True)
        for total, like in zip(row, tower, strict=True)
    }
    with tf.name_scope("mean"):
        means = {
            key: _scale(total, len(grads), like)
            for key, (total, like) in unique.items()
        }
    return [[means[id(total)] for total in row] for row in sums]


def check_divisible(grads: TowerTensors, *, caller: str) -> None:
    """Refuses integer gradients, naming their positions and dtypes."""
    whole = [
        f"{n} ({tensor.dtype.name})"
        for n, tensor in enumerate(grads[0])
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex)
    ]
    if whole:
        raise TypeError(
            f"{caller}: gradients must be floating; got others at positions "
            f"{', '.join(whole)}. Reduce them without the mean, or cast them first."
        )


def _scale(total: Tensorlike, num_towers: int, like: Tensorlike) -> Tensorlike:
    factor = 1.0 / num_towers
    dtype = like.dtype if _is_half(like) else total.dtype

    def scale(dense: tf.Tensor) -> tf.Tensor:
        return tf.cast(dense * tf.constant(factor, dense.dtype), dtype)

    return map_dense(scale, total)

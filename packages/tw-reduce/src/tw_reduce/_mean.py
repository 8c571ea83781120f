"""Dividing a sum by the number of towers.

The multiplication costs a pass over every gradient. Where the loss or the
learning rate can take the factor 1/K instead, the plain sum is the faster mean.
"""

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from tw_core import without_autograph
from tw_reduce._around import Around
from tw_reduce._tower_tensors import (
    Reducer,
    Tensorlike,
    TowerTensors,
    check_reduced,
    check_tower_tensors,
    dense_part,
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

    Raises:
      TypeError: when called with integer gradients, which have no exact mean.
      ValueError: when ``reducer`` returns another shape of list.
    """
    if isinstance(reducer, Around):
        return Around(mean(reducer.inner), partial(_move_divisible, reducer.move))
    return partial(_reduce_to_means, reducer)


@without_autograph
def _move_divisible(
    move: Callable[[Reducer, TowerTensors], list[list[Tensorlike]]],
    reducer: Reducer,
    grads: TowerTensors,
) -> list[list[Tensorlike]]:
    check_tower_tensors(grads, caller="mean")
    check_divisible(grads, caller="mean")  # where positions are the caller's
    return move(reducer, grads)


@without_autograph
def _reduce_to_means(reducer: Reducer, grads: TowerTensors) -> list[list[Tensorlike]]:
    check_tower_tensors(grads, caller="mean")
    check_divisible(grads, caller="mean")
    sums = reducer(grads)
    check_reduced(sums, grads, caller="mean")
    if len(grads) == 1:
        return sums
    with tf.name_scope("mean"):
        unique = {id(total): total for row in sums for total in row}
        means = {key: _scale(total, len(grads)) for key, total in unique.items()}
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
            f"{caller}: gradients must be floating; got integers at positions "
            f"{', '.join(whole)}. Reduce them without the mean, or cast them first."
        )


def _scale(total: Tensorlike, num_towers: int) -> Tensorlike:
    dense = dense_part(total)
    with tf.device(dense.device):
        scaled = dense * tf.constant(1.0 / num_towers, dense.dtype)
    if not isinstance(total, tf.IndexedSlices):
        return scaled
    return tf.IndexedSlices(scaled, total.indices, total.dense_shape)

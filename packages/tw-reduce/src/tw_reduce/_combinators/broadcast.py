"""Copying each reduced tensor to every tower's device once.

Under ``packed`` it decides what travels back to the towers: a pack for each of
them, which is cut up there, instead of every small gradient by itself.
"""

import tensorflow as tf

from tw_core.checks import check_function
from tw_reduce._checked_towers import checked_towers
from tw_reduce._combinators.combinator import Around
from tw_reduce._reducer import (
    Reducer,
    Tensorlike,
    TowerTensors,
    check_reduced,
    dense_part,
)


def spread(reducer: Reducer) -> Reducer:
    """Makes a reducer whose results lie on each tower's own device.

    ``packed(spread(sum_balanced))`` suits replicated training with many small
    variables.

    Args:
      reducer: [K][N] -> [K][N]; may give several towers the same tensor.

    Returns:
      A reducer; result n of tower k lies where ``grads[k][n]`` does, and towers
      on one device share it.

    Raises:
      TypeError: ``reducer`` is no function.
    """
    check_function("spread", reducer=reducer)
    return Around(reducer, _reduce_and_spread)


def _reduce_and_spread(reducer: Reducer, grads: TowerTensors) -> list[list[Tensorlike]]:
    grads = checked_towers(grads, caller="spread")
    reduced = reducer(grads)
    check_reduced(reduced, grads, caller="spread")
    copies: dict[tuple[int, str], Tensorlike] = {}
    with tf.name_scope("spread"):
        return [
            [
                _copy(tensor, dense_part(own).device, copies)
                for tensor, own in zip(row, tower, strict=True)
            ]
            for row, tower in zip(reduced, grads, strict=True)
        ]


def _copy(
    tensor: Tensorlike, device: str, copies: dict[tuple[int, str], Tensorlike]
) -> Tensorlike:
    if dense_part(tensor).device == device:
        return tensor
    key = (id(tensor), device)
    if key not in copies:
        with tf.device(device):
            copies[key] = tf.nest.map_structure(
                tf.identity, tensor, expand_composites=True
            )
    return copies[key]

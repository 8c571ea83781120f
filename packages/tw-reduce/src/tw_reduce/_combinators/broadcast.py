"""Copying each reduced tensor to every tower's device once.

Under ``packed`` it decides what travels back to the towers: a pack for each of
them, which is cut up there, instead of every small gradient by itself.
"""

import tensorflow as tf

from tw_core.checks import check_function
from tw_core.gradients import values_of
from tw_reduce._checked_towers import CheckedTowers
from tw_reduce._checks import reduced_by
from tw_reduce._combinators.mean import Combinator
from tw_reduce._reducer import Reducer, Tensorlike


def broadcast(reducer: Reducer) -> Reducer:
    """Makes a reducer whose results lie on each tower's own device.

    ``packed(broadcast(sum_balanced))`` suits replicated training with many small
    variables.

    Args:
      reducer: [K][N] -> [K][N]; may give several towers the same tensor.

    Returns:
      A reducer; result n of tower k lies where ``grads[k][n]`` does, and towers
      on one device share it.

    Raises:
      TypeError: ``reducer`` is not a function.
      ValueError: when called, ``reducer`` returns another shape of list.
    """
    check_function("broadcast", reducer=reducer)
    return Combinator("broadcast", reducer, _reduce_and_copy)


def _reduce_and_copy(reducer: Reducer, grads: CheckedTowers) -> list[list[Tensorlike]]:
    reduced = reduced_by(reducer, grads, caller="broadcast")
    copies: dict[tuple[int, str], Tensorlike] = {}
    with tf.name_scope("spread"):  # graphs keep the combinator's first name
        return [
            [
                _copy(tensor, values_of(own).device, copies)
                for tensor, own in zip(row, tower, strict=True)
            ]
            for row, tower in zip(reduced, grads, strict=True)
        ]


def _copy(
    tensor: Tensorlike, device: str, copies: dict[tuple[int, str], Tensorlike]
) -> Tensorlike:
    if values_of(tensor).device == device:
        return tensor
    key = (id(tensor), device)
    if key not in copies:
        with tf.device(device):
            copies[key] = tf.nest.map_structure(
                tf.identity, tensor, expand_composites=True
            )
    return copies[key]

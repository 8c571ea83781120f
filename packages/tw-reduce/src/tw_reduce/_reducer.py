"""The input and output of a reducer, K lists of N tensors, and functions on them.

A reducer is any callable ``[K][N] -> [K][N]``.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core.internal import check_nested, map_values

Tensorlike: TypeAlias = tf.Tensor | tf.IndexedSlices
"""A dense or a sparse gradient; None is refused before any algorithm."""

TowerTensors: TypeAlias = Sequence[Sequence[Tensorlike]]
"""[K][N]: tower k's tensor for variable n."""

Reducer: TypeAlias = Callable[[TowerTensors], list[list[Tensorlike]]]
"""Adds over all towers; every tower gets the sums, with the same bits.

Towers whose sums were added in different orders would diverge: each applies its own
sums, and decides from them whether an update is finite or skipped.
"""

HALF_DTYPES = (tf.float16, tf.bfloat16)


def is_stateful(reducer: Any) -> bool:
    """Returns whether a reducer has memory, which a ``ReducerState`` must keep."""
    methods = (getattr(reducer, name, None) for name in ("init", "update"))
    return not isinstance(reducer, type) and all(map(callable, methods))


def rows(
    columns: Sequence[Sequence[Tensorlike]], num_towers: int
) -> list[list[Tensorlike]]:
    """Turns [N][K] into [K][N], even where N is 0."""
    return [[column[k] for column in columns] for k in range(num_towers)]


def map_dense(fn: Callable[[tf.Tensor], tf.Tensor], tensor: Tensorlike) -> Tensorlike:
    """As ``map_values``, on the tensor's own device."""
    with tf.device(tensor.device):
        return map_values(fn, tensor)


def cast_to(tensor: Tensorlike, dtype: tf.DType) -> Tensorlike:
    """Casts a tensor on its own device, if it has another dtype."""
    if tensor.dtype == dtype:
        return tensor
    return map_dense(lambda dense: tf.cast(dense, dtype), tensor)


def check_reduced(reduced: Sequence[Sequence[Tensorlike]], grads: TowerTensors) -> None:
    """Refuses the result of a reducer that changed the shape of the list.

    Args:
      reduced: the reducer's result.
      grads: [K][N]; its argument.

    Raises:
      ValueError: ``reduced`` is not [K][N].
      TypeError: ``grads`` is not a list of lists.
    """
    check_nested(grads=grads, of="tensors")
    reduced_by(lambda _: reduced, grads)  # type: ignore[arg-type,return-value]


def reduced_by(reducer: Reducer, grads: TowerTensors) -> list[list[Tensorlike]]:
    """Calls an inner reducer, and refuses a result that is not [K][N]."""
    reduced = reducer(grads)
    expected = [len(tower) for tower in grads]
    try:
        got = [len(tower) for tower in reduced]
    except TypeError:
        got = None
    if got != expected:
        found = type(reduced).__name__ if got is None else f"lists of lengths {got}"
        raise ValueError(
            "The reducer must return one list per tower, as long as those passed, of "
            f"lengths {expected}; got {found}. A reducer is [K][N] -> [K][N] tensors."
        )
    return reduced


def map_results(
    fn: Callable[[Tensorlike, Tensorlike], Tensorlike],
    results: TowerTensors,
    grads: TowerTensors,
) -> list[list[Tensorlike]]:
    """Applies ``fn(result, gradient)`` to [K][N] results, once to a shared one."""
    changed: dict[int, Tensorlike] = {}
    for row, tower in zip(results, grads, strict=True):
        for result, grad in zip(row, tower, strict=True):
            if id(result) not in changed:
                changed[id(result)] = fn(result, grad)
    return [[changed[id(result)] for result in row] for row in results]

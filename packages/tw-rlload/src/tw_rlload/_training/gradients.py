"""From every tower's gradients to what is applied: weigh, reduce, clip.

The same in both modes. Variables may be shared by the towers or be each tower's
own; the caller applies tower 0's result, or every tower's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core import (
    check_grad_list,
    ensure_gradient_shapes,
    merge_grad_list,
    split_grad_list,
    sum_duplicate_rows,
)
from tw_reduce import Reducer, mean, sum_balanced

Pairs: TypeAlias = "list[tuple[Any, tf.Variable]]"


def default_reducer(devices: Sequence[str]) -> Reducer:
    """Returns the mean, added where the least was added so far."""
    return mean(partial(sum_balanced, devices=list(devices)))


def combine_gradients(
    grad_list: Sequence[Pairs],
    *,
    reducer: Reducer,
    tower_weights: Sequence[tf.Tensor] | None,
    grad_norm_clipping: tf.Tensor | float | None,
    caller: str,
) -> list[Pairs]:
    """Averages the towers' gradients and clips them by their global norm.

    Args:
      grad_list: [K][N] (gradient, variable) pairs.
      reducer: gives every tower the mean over towers.
      tower_weights: [K] float32 scalars; None where all towers weigh the same.
      grad_norm_clipping: bound of the norm over all variables; None for none.
      caller: who asks; opens messages.

    Returns:
      [K][M] pairs, M the number of variables that have a gradient.

    Raises:
      ValueError: towers that differ in their variables, a gradient that only
        some towers have or that has another shape than its variable, or no
        gradient at all. A shape that is not known yet is compared where the
        gradient is computed, by an op such as ``check_gradient_shape/tower0/w``.
    """
    kept = _without_missing(grad_list, caller)
    check_grad_list(kept, caller=caller)
    grads, variables = split_grad_list(ensure_gradient_shapes(kept))
    if tower_weights is not None:
        grads = _weighted(grads, tower_weights)
    averaged = [_without_duplicate_rows(tower) for tower in reducer(grads)]
    if grad_norm_clipping is not None:
        averaged = [_clipped(tower, grad_norm_clipping) for tower in averaged]
    return merge_grad_list(averaged, variables)


def _without_missing(grad_list: Sequence[Pairs], caller: str) -> list[Pairs]:
    """Leaves out the variables for which every tower has None."""
    counts = [len(tower) for tower in grad_list]
    if len(set(counts)) > 1 or not all(counts):
        check_grad_list(grad_list, caller=caller, allow_none=True)
    columns = list(zip(*grad_list, strict=True))
    used = [n for n, column in enumerate(columns) if any(_has(pair) for pair in column)]
    partly = [n for n in used if not all(_has(pair) for pair in columns[n])]
    if partly:
        listed = "\n".join(f"  - {_missing(columns[n])}" for n in partly)
        raise ValueError(
            f"{caller}: a variable has a gradient in every tower or in none; got:\n"
            f"{listed}\nBuild the same loss in every tower."
        )
    if not used:
        names = [pair[1].name for pair in grad_list[0]]
        raise ValueError(
            f"{caller}: no variable has a gradient, of {names}; the loss depends on "
            "none of them."
        )
    return [[tower[n] for n in used] for tower in grad_list]


def _has(pair: tuple[Any, Any]) -> bool:
    return pair[0] is not None


def _missing(column: Sequence[tuple[Any, Any]]) -> str:
    towers = [k for k, pair in enumerate(column) if not _has(pair)]
    return f"{column[0][1].name} has None in towers {towers} of {len(column)}"


def _weighted(
    grads: Sequence[Sequence[Any]], tower_weights: Sequence[tf.Tensor]
) -> list[list[Any]]:
    """Scales each tower, so that the plain mean becomes the weighted one."""
    total = tf.add_n(list(tower_weights))
    factors = [len(grads) * weight / total for weight in tower_weights]
    return [
        [_scaled(grad, factor) for grad in tower]
        for tower, factor in zip(grads, factors, strict=True)
    ]


def _scaled(grad: Any, factor: tf.Tensor) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        values = _scaled(grad.values, factor)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad * tf.cast(factor, grad.dtype)


def _without_duplicate_rows(grads: Sequence[Any]) -> list[Any]:
    return [
        sum_duplicate_rows(grad) if isinstance(grad, tf.IndexedSlices) else grad
        for grad in grads
    ]


def _clipped(grads: list[Any], bound: tf.Tensor | float) -> list[Any]:
    return list(tf.clip_by_global_norm(grads, bound)[0])

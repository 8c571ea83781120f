"""From every tower's gradients to what is applied: weigh, reduce, average, clip.

The same in both modes. Variables may be shared by the towers or be each tower's
own; the caller applies tower 0's result, or every tower's.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core import Tower
from tw_core.checks import check_function, check_number, naming
from tw_core.gradients import (
    check_any_gradient,
    check_grad_list,
    ensure_gradient_shapes,
    merge_grad_list,
    scale,
    split_grad_list,
    with_unique_rows,
)
from tw_reduce import Reducer, mean, sum_balanced

Pairs: TypeAlias = "list[tuple[Any, tf.Variable]]"
Combine: TypeAlias = Callable[..., list[Pairs]]
"""``combine_gradients`` with its options bound."""


def averaging(
    reducer: Reducer | None, towers: Sequence[Tower], *, caller: str, stacklevel: int
) -> Reducer:
    """Returns what gives every tower the mean of the gradients.

    Args:
      reducer: adds; None adds where the least was added so far. One that averages
        already, as reducers of 0.1 did, is taken as it is, with a warning.
      towers: K towers.
      caller: who asks; opens messages.
      stacklevel: of the warning, as ``warnings.warn`` counts.

    Raises:
      TypeError: neither None nor a function.
    """
    if reducer is None:
        reducer = partial(sum_balanced, devices=[tower.device for tower in towers])
    check_function(caller, reducer=reducer)
    if not getattr(reducer, "averages", False):
        return mean(reducer)
    warnings.warn(
        f"{caller}: reducer averages, which is deprecated and will be divided a "
        "second time in 0.3; pass the reducer of sums that tw_reduce.mean was given.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return reducer


def check_clipping(bound: float | None, *, caller: str) -> float | None:
    """Returns the bound of the gradients' norm, or None for none.

    Raises:
      TypeError: neither a number nor None.
      ValueError: a negative bound, NaN, or infinity.
    """
    if bound is None:
        return None
    if isinstance(bound, Real) and not bound >= 0:
        raise ValueError(
            f"{caller}: grad_norm_clipping must be above 0, or None; got {bound}."
        )
    return check_number(caller, grad_norm_clipping=bound) or None


def combine_gradients(
    grad_list: Sequence[Pairs],
    tower_weights: Sequence[tf.Tensor] | None,
    *,
    reducer: Reducer,
    grad_norm_clipping: tf.Tensor | float | None,
    caller: str,
) -> list[Pairs]:
    """Averages the towers' gradients and clips them by their global norm.

    Args:
      grad_list: [K][N] (gradient, variable) pairs.
      tower_weights: [K] float32 scalars; None where all towers weigh the same.
      reducer: returns the mean over towers to every tower; see ``averaging``.
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
    with naming(caller):
        check_grad_list(kept)
    grads, variables = split_grad_list(ensure_gradient_shapes(kept))
    if tower_weights is not None:
        grads = _weighted(grads, tower_weights)
    averaged = [[with_unique_rows(g) for g in tower] for tower in reducer(grads)]
    if grad_norm_clipping is not None:
        averaged = [
            tf.clip_by_global_norm(tower, grad_norm_clipping)[0] for tower in averaged
        ]
    return merge_grad_list(averaged, variables)


def _without_missing(grad_list: Sequence[Pairs], caller: str) -> list[Pairs]:
    """Leaves out the variables for which every tower has None."""
    counts = [len(tower) for tower in grad_list]
    if len(set(counts)) > 1 or not all(counts):
        with naming(caller):
            check_grad_list(grad_list, allow_none=True)
    grads, variables = split_grad_list(grad_list)
    check_any_gradient(caller, [g for tower in grads for g in tower], variables[0])
    towers_of = {
        n: [k for k, grad in enumerate(column) if grad is None]
        for n, column in enumerate(zip(*grads, strict=True))
    }
    num_towers = len(grads)
    partly = [
        f"  - {variables[0][n].name} has None in towers {missing} of {num_towers}"
        for n, missing in towers_of.items()
        if 0 < len(missing) < num_towers
    ]
    if partly:
        raise ValueError(
            f"{caller}: a variable has a gradient in every tower or in none; got:\n"
            + "\n".join(partly)
            + "\nBuild the same loss in every tower."
        )
    used = [n for n, missing in towers_of.items() if not missing]
    return [[tower[n] for n in used] for tower in grad_list]


def _weighted(
    grads: Sequence[Sequence[Any]], tower_weights: Sequence[tf.Tensor]
) -> list[list[Any]]:
    """Scales each tower, so that the plain mean becomes the weighted one."""
    total = tf.add_n(list(tower_weights))
    factors = [len(grads) * weight / total for weight in tower_weights]
    return [
        [scale(grad, factor) for grad in tower]
        for tower, factor in zip(grads, factors, strict=True)
    ]

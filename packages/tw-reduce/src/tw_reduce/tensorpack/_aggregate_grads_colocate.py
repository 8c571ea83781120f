"""Adding each variable's gradients where the variable lives.

Carries on tensorpack 0.11's function of this name
(``tensorpack/graph_builder/utils.py``): arguments and results are the same.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core import without_autograph
from tw_core.checks import check_flag
from tw_reduce._checked_towers import checked_towers
from tw_reduce._combinators.mean import check_divisible, mean
from tw_reduce._combinators.packed import packed
from tw_reduce._combinators.partition import routed
from tw_reduce._reducer import (
    Reducer,
    Tensorlike,
    TowerTensors,
    check_addable,
    check_nested,
    check_tower_tensors,
    columns,
)
from tw_reduce._sums.add_n import add_columns


@without_autograph
def aggregate_grads_colocate(
    all_grads: Sequence[Sequence[tuple[Tensorlike, Any]]], average: bool = True
) -> list[tuple[Tensorlike, Any]]:
    """Adds the towers' gradients of each variable on the variable's device.

    Args:
      all_grads: [K][N] (gradient, variable) pairs; the variables are shared by
        the towers.
      average: means instead of sums.

    Returns:
      [N] (gradient, variable) pairs, with tower 0's variables. Sparse
      gradients stay sparse.

    Raises:
      ValueError: no tower, towers of unequal length, None, differing dtypes or
        shapes, towers that do not share their variables.
      TypeError: something else than pairs of a gradient and its variable, or
        than numbers; integers with ``average``.
    """
    check_flag("aggregate_grads_colocate", average=average)
    _check_pairs(all_grads)
    grads = [[grad for grad, _ in tower] for tower in all_grads]
    check_tower_tensors(grads, caller="aggregate_grads_colocate")
    variables = [variable for _, variable in all_grads[0]]
    _check_shared(all_grads)
    grads = checked_towers(
        grads,
        caller="aggregate_grads_colocate",
        names=[str(variable.name) for variable in variables],
    )
    check_addable(grads, caller="aggregate_grads_colocate")
    homes = [_home(variable) for variable in variables]
    if average:
        check_divisible(grads, caller="aggregate_grads_colocate")
    names = {home: f"device{i}" for i, home in enumerate(dict.fromkeys(homes))}
    reducers = {names[home]: _sum_at(home, average=average) for home in names}
    with tf.name_scope("aggregate_grads_colocate"):
        reduced = routed(lambda info: names[homes[info.index]], reducers)(grads)
    return list(zip(reduced[0], variables, strict=True))


def _home(variable: Any) -> str:
    # A Keras variable holds the one of TensorFlow that has a device.
    inner = variable if hasattr(variable, "device") else variable.value
    return str(inner.device or "")


def _sum_at(home: str, *, average: bool) -> Reducer:
    # A pack a tower and device travels faster than each small gradient alone.
    reducer = packed(partial(_sum_on, device=home or None))
    return mean(reducer) if average else reducer


def _sum_on(grads: TowerTensors, *, device: str | None) -> list[list[Tensorlike]]:
    sums = add_columns(columns(grads), [device] * len(grads[0]))
    return [list(sums) for _ in grads]


def _check_pairs(all_grads: Sequence[Sequence[tuple[Tensorlike, Any]]]) -> None:
    check_nested(all_grads, "aggregate_grads_colocate", of="(gradient, variable) pairs")
    others = [
        f"tower {k} at {n} ({type(pair).__name__})"
        for k, tower in enumerate(all_grads)
        for n, pair in enumerate(tower)
        if not isinstance(pair, Sequence)
        or len(pair) != 2
        or not hasattr(pair[1], "assign")
    ]
    if others:
        raise TypeError(
            "aggregate_grads_colocate: every tower must bring pairs of a gradient and "
            f"its variable; got something else from {', '.join(others)}."
        )


def _check_shared(all_grads: Sequence[Sequence[tuple[Tensorlike, Any]]]) -> None:
    strangers = [
        f"{n} ({[variable.name for _, variable in column]})"
        for n, column in enumerate(zip(*all_grads, strict=True))
        if len({id(variable) for _, variable in column}) > 1
    ]
    if strangers:
        raise ValueError(
            "aggregate_grads_colocate: all towers must bring the same variables in "
            f"the same order; they differ at positions {', '.join(strangers)}. For "
            "towers with variables of their own take a reducer and "
            "tw_core.merge_grad_list."
        )

"""Adding each variable's gradients where the variable lives.

Carries on tensorpack 0.11's function of this name
(``tensorpack/graph_builder/utils.py``): arguments and results are the same.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_reduce._add_columns import add_columns
from tw_reduce._mean import mean
from tw_reduce._tower_tensors import (
    Tensorlike,
    TowerTensors,
    check_tower_tensors,
    columns,
)


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
      TypeError: a gradient that is no tensor; integers with ``average``.
    """
    grads = [[grad for grad, _ in tower] for tower in all_grads]
    check_tower_tensors(grads, caller="aggregate_grads_colocate")
    variables = [variable for _, variable in all_grads[0]]
    _check_shared(all_grads)
    devices = [variable.device or None for variable in variables]
    reducer = partial(_sum_on, devices=devices)
    with tf.name_scope("aggregate_grads_colocate"):
        reduced = (mean(reducer) if average else reducer)(grads)
    return list(zip(reduced[0], variables, strict=True))


def _sum_on(
    grads: TowerTensors, *, devices: Sequence[str | None]
) -> list[list[Tensorlike]]:
    sums = add_columns(columns(grads), devices)
    return [list(sums) for _ in grads]


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

"""Lists of gradients: [K][N] (gradient, variable) pairs, split and merged.

K towers, N variables, always in that order. A gradient is a tensor, an
``IndexedSlices`` or None.
"""

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tw_core._autograph import without_autograph

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
GradList: TypeAlias = "Sequence[Sequence[tuple[Gradient, tf.Variable]]]"


@without_autograph
def split_grad_list(
    grad_list: GradList,
) -> tuple[list[list[Gradient]], list[list[tf.Variable]]]:
    """Takes pairs apart.

    Args:
      grad_list: [K][N] (gradient, variable) pairs.

    Returns:
      [K][N] gradients and [K][N] variables.

    >>> split_grad_list([[("g0", "v0"), ("g1", "v1")]])
    ([['g0', 'g1']], [['v0', 'v1']])
    """
    grads = [[grad for grad, _ in tower] for tower in grad_list]
    variables = [[variable for _, variable in tower] for tower in grad_list]
    return grads, variables


@without_autograph
def merge_grad_list(
    all_grads: Sequence[Sequence[Gradient]],
    all_vars: Sequence[Sequence[tf.Variable]],
) -> list[list[tuple[Gradient, tf.Variable]]]:
    """Puts gradients and variables together; undoes ``split_grad_list``.

    Args:
      all_grads: [K][N] gradients.
      all_vars: [K][N] variables.

    Returns:
      [K][N] pairs.

    Raises:
      ValueError: the two differ in K or N.

    >>> merge_grad_list([["g0", "g1"]], [["v0", "v1"]])
    [[('g0', 'v0'), ('g1', 'v1')]]
    """
    grads, variables = [len(g) for g in all_grads], [len(v) for v in all_vars]
    if grads != variables:
        raise ValueError(
            f"merge_grad_list: gradients and variables must have the same lengths; "
            f"got {grads} gradients and {variables} variables a tower."
        )
    return [
        list(zip(grads, variables, strict=True))
        for grads, variables in zip(all_grads, all_vars, strict=True)
    ]

"""Lists of gradients: [K][N] (gradient, variable) pairs, split, merged and shaped.

K towers, N variables, always in that order. A gradient is a tensor, an
``IndexedSlices`` or None.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core._checks import check_nested
from tw_core._modes import without_autograph

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
GradList: TypeAlias = "Sequence[Sequence[tuple[Gradient, tf.Variable]]]"


def list_pairs(name: str, given: Any) -> list[tuple[Any, Any]]:
    """Lists the (gradient, variable) pairs of any iterable, such as a ``zip``.

    Args:
      name: the argument's name.
      given: its value; neither gradients nor variables of the pairs are checked.

    Raises:
      TypeError: something else.
    """
    no_list = str | dict | tf.Tensor | tf.IndexedSlices | tf.Variable
    if isinstance(given, no_list) or not isinstance(given, Iterable):
        raise TypeError(
            f"{name} must be a list of (gradient, variable) pairs; got {given!r}."
        )
    pairs = list(given)
    others = [pair for pair in pairs if not is_pair(pair)]
    if others:
        raise TypeError(f"{name} must hold (gradient, variable) pairs; got {others}.")
    return [(grad, variable) for grad, variable in pairs]


def is_pair(value: Any) -> bool:
    """Returns whether a value is a tuple or list of two items."""
    return isinstance(value, tuple | list) and len(value) == 2


@without_autograph
def split_grad_list(
    grad_list: GradList,
) -> tuple[list[list[Gradient]], list[list[tf.Variable]]]:
    """Separates gradients from variables.

    Args:
      grad_list: [K][N] (gradient, variable) pairs.

    Returns:
      [K][N] gradients and [K][N] variables.

    Raises:
      TypeError: something that is not a list of lists of pairs.

    >>> split_grad_list([[("g0", "v0"), ("g1", "v1")]])
    ([['g0', 'g1']], [['v0', 'v1']])
    """
    check_nested(grad_list=grad_list, of="pairs")
    towers = [list_pairs(f"grad_list[{k}]", own) for k, own in enumerate(grad_list)]
    grads = [[grad for grad, _ in tower] for tower in towers]
    variables = [[variable for _, variable in tower] for tower in towers]
    return grads, variables


@without_autograph
def merge_grad_list(
    all_grads: Sequence[Sequence[Gradient]],
    all_vars: Sequence[Sequence[tf.Variable]],
) -> list[list[tuple[Gradient, tf.Variable]]]:
    """Pairs gradients with variables; undoes ``split_grad_list``.

    Args:
      all_grads: [K][N] gradients.
      all_vars: [K][N] variables.

    Returns:
      [K][N] pairs.

    Raises:
      ValueError: the two differ in K or N.
      TypeError: one is not a list of lists.

    >>> merge_grad_list([["g0", "g1"]], [["v0", "v1"]])
    [[('g0', 'v0'), ('g1', 'v1')]]
    """
    check_nested(all_grads=all_grads, of="gradients")
    check_nested(all_vars=all_vars, of="variables")
    grads, variables = [len(g) for g in all_grads], [len(v) for v in all_vars]
    if grads != variables:
        raise ValueError(
            f"Gradients and variables must have the same lengths; got {grads} "
            f"gradients and {variables} variables per tower."
        )
    return [
        list(zip(grads, variables, strict=True))
        for grads, variables in zip(all_grads, all_vars, strict=True)
    ]

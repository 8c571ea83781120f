"""Lists of gradients: [K][N] (gradient, variable) pairs, split and merged.

K towers, N variables, always in that order. A gradient is a tensor, an
``IndexedSlices`` or None.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core.checks import check_list
from tw_core.modes import without_autograph

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

    Raises:
      TypeError: something that is no list of lists of pairs.

    >>> split_grad_list([[("g0", "v0"), ("g1", "v1")]])
    ([['g0', 'g1']], [['v0', 'v1']])
    """
    for k, tower in enumerate(_lists("split_grad_list", grad_list=grad_list)):
        for n, pair in enumerate(tower):
            if (
                isinstance(pair, str)
                or not isinstance(pair, Sequence)
                or len(pair) != 2
            ):
                raise TypeError(
                    "split_grad_list: wants (gradient, variable) pairs; got "
                    f"{pair!r} at tower {k} item {n}."
                )
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
      TypeError: one is no list of lists.

    >>> merge_grad_list([["g0", "g1"]], [["v0", "v1"]])
    [[('g0', 'v0'), ('g1', 'v1')]]
    """
    _lists("merge_grad_list", all_grads=all_grads)
    _lists("merge_grad_list", all_vars=all_vars)
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


def _lists(caller: str, /, **argument: Any) -> Sequence[Sequence[Any]]:
    ((name, towers),) = argument.items()
    check_list(caller, of="lists, one per tower", empty=True, **argument)
    for k, tower in enumerate(towers):
        own = {f"{name}[{k}]": tower}
        check_list(caller, of="one tower's items", empty=True, **own)
    return towers  # type: ignore[no-any-return]

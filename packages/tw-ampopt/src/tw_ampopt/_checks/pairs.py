"""What callers of the optimizer protocol bring: variables, and pairs with them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import check_variables
from tw_ampopt._variables import identity, name_of
from tw_core import canonical_device


def check_pairs(grads_and_vars: Iterable[Any], *, caller: str) -> list[tuple[Any, Any]]:
    """Checks [N] pairs.

    Raises:
      TypeError: something that is no pair, or no variable in one.
      ValueError: no gradient at all, or a variable that comes twice or belongs to
        another graph.
    """
    pairs = list_of_pairs(grads_and_vars, caller=caller)
    wrong = [p for p in pairs if not isinstance(p, tuple | list) or len(p) != 2]
    if wrong:
        raise TypeError(f"{caller}: wants (gradient, variable) pairs; got {wrong!r}.")
    check_variables((variable for _, variable in pairs), caller=caller)
    names = [name_of(variable) for _, variable in pairs]
    if all(grad is None for grad, _ in pairs):
        raise ValueError(
            f"{caller}: no gradient for any variable; got {names}. Does the loss "
            "depend on them?"
        )
    counts = Counter(identity(variable) for _, variable in pairs)
    twice = sorted({name_of(v) for _, v in pairs if counts[identity(v)] > 1})
    if twice:
        raise ValueError(
            f"{caller}: {twice} came more than once; each variable has one gradient. "
            "Add them up first."
        )
    return [(grad, variable) for grad, variable in pairs]


def list_of_pairs(grads_and_vars: Any, *, caller: str) -> list[Any]:
    """Returns the items of an iterable, as ``zip`` gives one.

    Raises:
      TypeError: nothing that has items.
    """
    if isinstance(grads_and_vars, str | dict) or not isinstance(
        grads_and_vars, Iterable
    ):
        raise TypeError(
            f"{caller}: wants a list of (gradient, variable) pairs; got "
            f"{grads_and_vars!r}."
        )
    return list(grads_and_vars)


def trained_variables(
    var_list: Iterable[Any] | None, default: Iterable[Any], *, caller: str
) -> list[Any]:
    """Returns the variables whose gradients ``compute_gradients`` is asked for.

    Raises:
      TypeError: no list of variables, or some that cannot be trained.
      ValueError: there are none, or another graph's.
    """
    if var_list is not None and not isinstance(var_list, list | tuple):
        raise TypeError(
            f"{caller}: var_list must be a list of variables, or None for all "
            f"trainable ones; got {var_list!r}."
        )
    variables = list(default if var_list is None else var_list)
    if not variables:
        raise ValueError(
            f"{caller}: no variables; wants those that the loss trains, or None for "
            f"all trainable ones, made before; got var_list={var_list!r}."
        )
    return check_variables(variables, caller=caller)


def common_device(variables: Sequence[tf.Variable]) -> str:
    """Returns the device that holds all variables, or ``""`` where there is none."""
    devices = {canonical_device(variable.device) for variable in variables}
    return str(variables[0].device) if len(devices) == 1 else ""

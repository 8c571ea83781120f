"""What callers of the optimizer protocol bring: variables, and pairs with them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._inner import identity
from tw_core import canonical_device


def check_pairs(grads_and_vars: Iterable[Any], *, caller: str) -> list[tuple[Any, Any]]:
    """Checks [N] pairs.

    Raises:
      TypeError: something that is no pair.
      ValueError: no gradient at all, or a variable that comes twice.
    """
    pairs = list(grads_and_vars)
    wrong = [p for p in pairs if not isinstance(p, tuple | list) or len(p) != 2]
    if wrong:
        raise TypeError(
            f"{caller}: wants (gradient, variable) pairs; got {wrong[0]!r}."
        )
    names = [str(variable.name) for _, variable in pairs]
    if all(grad is None for grad, _ in pairs):
        raise ValueError(
            f"{caller}: no gradient for any variable; got {names}. Does the loss "
            "depend on them?"
        )
    counts = Counter(identity(variable) for _, variable in pairs)
    twice = sorted({str(v.name) for _, v in pairs if counts[identity(v)] > 1})
    if twice:
        raise ValueError(
            f"{caller}: {twice} came more than once; each variable has one gradient. "
            "Add them up first."
        )
    return [(grad, variable) for grad, variable in pairs]


def trained_variables(
    var_list: Iterable[Any] | None, default: Iterable[Any], *, caller: str
) -> list[Any]:
    """Returns the variables whose gradients ``compute_gradients`` is asked for.

    Raises:
      ValueError: there are none.
    """
    variables = list(default if var_list is None else var_list)
    if not variables:
        raise ValueError(
            f"{caller}.compute_gradients: no variables; wants those that the loss "
            "trains, or None for all trainable ones, made before; got "
            f"var_list={var_list!r}."
        )
    return variables


def common_device(variables: Sequence[tf.Variable]) -> str:
    """Returns the device that holds all variables, or ``""`` where there is none."""
    devices = {canonical_device(variable.device) for variable in variables}
    return str(variables[0].device) if len(devices) == 1 else ""

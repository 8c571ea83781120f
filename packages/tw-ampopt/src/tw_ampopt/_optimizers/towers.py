"""All towers' variables and gradients, as a ``TowerOptimizer`` is given them."""

from collections.abc import Sequence
from typing import Any

from tw_ampopt._checks.arguments import check_variables
from tw_ampopt._checks.gradients import check_gradients, check_pairs, list_pairs
from tw_ampopt._update.buffers import RawGradients
from tw_ampopt._variables import common_device, identity, name_of
from tw_core import Tower, check_towers, towers
from tw_core.checks import naming
from tw_core.gradients import check_any_gradient, check_grad_list
from tw_core.variables import repeated_variables, tf_variable


def variables_by_tower(variables: Any, *, caller: str) -> list[list[Any]]:
    """Makes [K][N] of [N] or [K][N] variables, checked.

    Returns:
      [K][N], or [1][N] where every tower has the same variables.
    """
    wanted = f"{caller}: variables must be one list per tower, or one list for all"
    lists = _lists_by_tower(variables, wanted)
    for tower in lists:
        check_variables(tower, caller=caller)
    if not any(lists):
        raise ValueError(
            f"{caller}: no variables; build the model before the optimizer, and pass "
            "e.g. [model.trainable_variables for model in models]."
        )
    keys = [list(map(identity, tower)) for tower in lists]
    if all(key == keys[0] for key in keys):
        lists = lists[:1]
    pairs = [[(None, tf_variable(v)) for v in tower] for tower in lists]
    with naming(caller):
        check_grad_list(pairs, allow_none=True)
    twice = repeated_variables([v for tower in lists for v in tower])
    if twice:
        raise ValueError(
            f"{caller}: {sorted(v.name for v in twice)} came more than once; every "
            "tower has its own variables, or all have the same list."
        )
    return lists


def towers_of(
    lists: Sequence[Sequence[Any]], given: Sequence[Tower] | None, *, caller: str
) -> tuple[Tower, ...]:
    """Returns the given towers, or one for each list of variables, on its device."""
    if given is None:
        return tuple(towers([common_device(tower) for tower in lists]))
    with naming(caller):
        check_towers(given)
    if len(lists) not in (1, len(given)):
        raise ValueError(
            f"{caller}: variables must be one list per tower, or one list for all; got "
            f"{len(lists)} lists for {len(given)} towers."
        )
    return tuple(given)


def gradients_by_tower(
    grads: Any, variables: Sequence[Sequence[Any]], total: int, *, caller: str
) -> RawGradients:
    """Makes [K][N][1] of [K][N] gradients, or of [N] for one tower.

    Args:
      grads: tensors, sparse or not, and None.
      variables: [K][N], or [1][N] where towers share.
      total: K.
      caller: opens messages.
    """
    wanted = f"{caller}: grads must be [K][N] gradients, one list per tower"
    by_tower = _lists_by_tower(grads, wanted)
    lists = list(variables) * (total if len(variables) == 1 else 1)
    counts, expected = [len(t) for t in by_tower], [len(v) for v in lists]
    if counts != expected:
        raise ValueError(
            f"{caller}: grads must hold one gradient (or None) per variable from each "
            f"of {total} towers, {expected} of them; got {counts}."
        )
    check_any_gradient(caller, [g for tower in by_tower for g in tower], lists[0])
    return _checked(by_tower, lists, caller)


def gradients_of_pairs(
    grads_and_vars: Any,
    variables: Sequence[Sequence[Any]],
    total: int,
    *,
    caller: str,
) -> RawGradients:
    """Makes [K][N][1] of [N] or [K][N] pairs, in the order of ``variables``.

    Args:
      grads_and_vars: pairs of a gradient, or None, and a variable.
      variables: [K][N], or [1][N] where towers share.
      total: K.
      caller: opens messages.
    """
    pairs = list_pairs(grads_and_vars, caller=caller)
    nested = bool(pairs) and all(isinstance(tower, list) for tower in pairs)
    by_tower = pairs if nested else [pairs]
    if len(by_tower) != total:
        raise ValueError(
            f"{caller}: grads_and_vars must hold pairs from each of {total} towers; "
            f"got them from {len(by_tower)}."
        )
    lists = list(variables) * (total if len(variables) == 1 else 1)
    grads = []
    for k, (tower, own) in enumerate(zip(by_tower, lists, strict=True)):
        checked = check_pairs(tower, caller=caller)
        _check_same([v for _, v in checked], own, f"{caller}, tower {k}")
        found = {identity(variable): grad for grad, variable in checked}
        grads.append([found[identity(variable)] for variable in own])
    return _checked(grads, lists, caller)


def _lists_by_tower(values: Any, wanted: str) -> list[list[Any]]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{wanted}; got {values!r}.")
    are_lists = [isinstance(tower, list | tuple) for tower in values]
    if not any(are_lists):
        return [list(values)]
    if not all(are_lists):
        raise TypeError(f"{wanted}; got lists and others: {values!r}.")
    return [list(tower) for tower in values]


def _checked(
    grads: Sequence[Sequence[Any]], lists: Sequence[Sequence[Any]], caller: str
) -> RawGradients:
    checked = check_gradients(grads, lists, caller=caller)
    return [[[grad] for grad in tower] for tower in checked]


def _check_same(came: Sequence[Any], own: Sequence[Any], caller: str) -> None:
    given, known = set(map(identity, came)), set(map(identity, own))
    unknown = [name_of(v) for v in came if identity(v) not in known]
    missing = [name_of(v) for v in own if identity(v) not in given]
    if unknown or missing:
        raise ValueError(
            f"{caller}: the pairs must have the variables that the optimizer was made "
            f"for; got unknown {unknown}, and missing are {missing}. A variable "
            "without a gradient takes part with None."
        )

"""The variables of all towers, as a ``TowerOptimizer`` is given them."""

from collections.abc import Sequence
from typing import Any

from tw_ampopt._checks.arguments import check_variables
from tw_ampopt._checks.pairs import common_device
from tw_ampopt._variables import as_tf_variable, identity
from tw_core import Tower, check_grad_list, towers
from tw_core.checks import check_list


def per_tower(variables: Sequence[Any], *, caller: str) -> list[list[Any]]:
    """Makes [K][N] of [N] or [K][N] variables, checked.

    Returns:
      [K][N], or [1][N] where every tower has the same variables.

    Raises:
      TypeError: no list of variables, or some that cannot be trained.
      ValueError: no variable, one that comes twice, or towers that differ.
    """
    if not isinstance(variables, Sequence) or isinstance(variables, str):
        raise TypeError(
            f"{caller}: variables must be a list a tower, or one list for all of them; "
            f"got {variables!r}."
        )
    nested = any(isinstance(tower, list | tuple) for tower in variables)
    if nested and not all(isinstance(tower, list | tuple) for tower in variables):
        raise TypeError(
            f"{caller}: variables must be a list a tower, or one list for all of them; "
            f"got both kinds: {variables!r}."
        )
    lists = [list(tower) for tower in variables] if nested else [list(variables)]
    for tower in lists:
        check_variables(tower, caller=caller)
    if not any(lists):
        raise ValueError(
            f"{caller}: no variables; build the model before the optimizer, and pass "
            "e.g. [model.trainable_variables for model in models]."
        )
    if all(
        list(map(identity, tower)) == list(map(identity, lists[0])) for tower in lists
    ):
        lists = lists[:1]
    pairs = [[(None, as_tf_variable(v)) for v in tower] for tower in lists]
    check_grad_list(pairs, caller=caller, allow_none=True)
    _check_once(lists, caller)
    return lists


def towers_of(
    lists: Sequence[Sequence[Any]], given: Sequence[Tower] | None, *, caller: str
) -> tuple[Tower, ...]:
    """Returns the given towers, or one for each list of variables, where it is.

    Raises:
      TypeError: no list of towers.
      ValueError: towers and lists that do not fit.
    """
    if given is None:
        devices = [common_device([as_tf_variable(v) for v in tower]) for tower in lists]
        return tuple(towers(devices))
    check_list(caller, towers=given, of="towers, e.g. tw_core.towers(devices)")
    strangers = [tower for tower in given if not isinstance(tower, Tower)]
    if strangers:
        raise TypeError(
            f"{caller}: towers must be a list of tw_core.Tower, as tw_core.towers "
            f"makes it of devices; got {strangers!r}."
        )
    if len(lists) not in (1, len(given)):
        raise ValueError(
            f"{caller}: wants one list of variables a tower, or one for all; got "
            f"{len(lists)} lists for {len(given)} towers."
        )
    return tuple(given)


def _check_once(lists: Sequence[Sequence[Any]], caller: str) -> None:
    seen: set[int] = set()
    twice = []
    for variable in (v for tower in lists for v in tower):
        if identity(variable) in seen:
            twice.append(variable.name)
        seen.add(identity(variable))
    if twice:
        raise ValueError(
            f"{caller}: {sorted(twice)} came more than once; every tower has its own "
            "variables, or all have the same list."
        )

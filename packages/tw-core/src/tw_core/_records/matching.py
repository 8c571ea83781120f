"""Matches the variables of one tower with those of another, by name where possible.

Variables that towers share have one name; copies have tower 0's name after a tower
prefix. Models that were built separately have different names, since Keras numbers
layers: ``dense/kernel`` in one model, ``dense_1/kernel`` in the next.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tw_core._records.origins import is_of_a_tower, without_numbers
from tw_core._variable_kinds import tf_variables


def repeated_variables(variables: Sequence[Any]) -> list[Any]:
    """Returns the variables that occur more than once, each once.

    A Keras variable and the ``tf.Variable`` in it are the same.
    """
    found: dict[int, list[Any]] = {}
    for variable, plain in zip(variables, tf_variables(variables), strict=True):
        found.setdefault(id(plain), []).append(variable)
    return [same[0] for same in found.values() if len(same) > 1]


def shared_variables(variables: Sequence[Sequence[Any]]) -> list[tuple[str, list[int]]]:
    """Finds the variables that several towers have in common.

    Args:
      variables: [K][N] variables, N may differ between towers.

    Returns:
      The name of each variable that more than one tower has, and those towers.
    """
    towers_of: dict[int, tuple[str, list[int]]] = {}
    for k, tower in enumerate(variables):
        for variable in {id(v): v for v in tf_variables(tower)}.values():
            towers_of.setdefault(id(variable), (variable.name, []))[1].append(k)
    return [(name, towers) for name, towers in towers_of.values() if len(towers) > 1]


def variable_mismatches(
    variables: Sequence[Sequence[Any]], base: list[list[str]]
) -> list[str]:
    """Describes how variables with these base names differ between towers, if so."""
    names = _comparable_names(variables, base)
    if names is None:
        lengths = [len(tower) for tower in variables]
        told = f"towers 0..{len(lengths) - 1} have {lengths} variables: {base}"
        return [told] if len(set(lengths)) > 1 else []
    if all(tower == names[0] for tower in names):
        return []
    if renumbered := _renumbered(names):
        return renumbered
    counts = [Counter(tower) for tower in names]
    orders = [
        f"tower {k} has the order {tower}, tower 0 {names[0]}"
        for k, tower in enumerate(names)
        if counts[k] == counts[0] and tower != names[0]
    ]
    return _lacking(counts) + orders


def _comparable_names(
    variables: Sequence[Sequence[Any]], names: list[list[str]]
) -> list[list[str]] | None:
    first = {id(v) for v in variables[0]}
    if all(set(tower) == set(names[0]) for tower in names) or all(
        any(id(v) in first for v in tower) or all(map(is_of_a_tower, tower))
        for tower in variables[1:]
    ):
        return names
    unnumbered = _without_numbers(names)
    has_common = set.intersection(*map(set, unnumbered))
    return unnumbered if has_common else None


def _without_numbers(names: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[without_numbers(name) for name in tower] for tower in names]


def _renumbered(names: Sequence[Sequence[str]]) -> list[str]:
    """Describes towers whose names differ only in the numbers that Keras gives."""
    first, *others = _without_numbers(names)
    if any(other != first for other in others):
        return []
    problems = [
        f"{column[0]} is called {name} in tower {k}"
        for column in zip(*names, strict=True)
        for k, name in enumerate(column)
        if name != column[0]
    ]
    unlike = any(set(tower) != set(names[0]) for tower in names)
    advice = (
        "only the numbers that Keras gives to unnamed layers differ: give each layer "
        "the same name in every tower, e.g. Dense(4, name='hidden')"
    )
    return [*problems, advice] if problems and unlike else []


def _lacking(counts: list[Counter[str]]) -> list[str]:
    problems = []
    for name in dict.fromkeys(name for tower in counts for name in tower):
        times = [tower[name] for tower in counts]
        lack = [k for k, n in enumerate(times) if n == 0]
        have = [k for k, n in enumerate(times) if n > 0]
        if lack:
            problems.append(
                f"{name} is missing from towers {lack}, while towers {have} have it"
            )
        elif len(set(times)) > 1:
            towers = f"towers 0..{len(times) - 1}"
            problems.append(f"{name} occurs {times} times in {towers}")
    return problems

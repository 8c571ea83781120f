"""Which variable of tower 0 each replica's variable is a copy of; by name alone.

A replica's variable carries a ``tower<k>`` part, k >= 1, in its name: first,
and again after a scope in which something (a moving average, an optimizer's
slot) was made. Tower 0's carries none, or ``tower0`` where a name scope named
it. Without these parts the two names are the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_COPY_PART = re.compile(r"tower[1-9]\d*")
_TOWER_PART = re.compile(r"tower\d+")


@dataclass(frozen=True)
class VariableFacts:
    """What of a variable decides whether it can be copied.

    Attributes:
      name: with or without ``":0"``.
      shape: as text, such as ``"(3, 4)"``.
      dtype: name of the dtype.
    """

    name: str
    shape: str
    dtype: str


@dataclass(frozen=True)
class SyncPlan:
    """Positions in the list of variables that the plan was made from.

    Attributes:
      copies: (from, to) pairs.
      unmatched: replicas' variables without one of tower 0 of the same name,
        shape and dtype.
    """

    copies: tuple[tuple[int, int], ...]
    unmatched: tuple[int, ...]


def plan_sync(variables: Sequence[VariableFacts]) -> SyncPlan:
    """Finds tower 0's variable for every variable of towers 1 and up.

    >>> names = ["w", "b", "tower1/w", "tower1/only_here"]
    >>> plan_sync([VariableFacts(name, "()", "float32") for name in names])
    SyncPlan(copies=((0, 2),), unmatched=(3,))
    """
    originals = _originals(variables)
    copies, unmatched = [], []
    for i, facts in enumerate(variables):
        if not _is_copy(facts.name):
            continue
        source = originals.get(_base_name(facts.name))
        if source is not None and _alike(variables[source], facts):
            copies.append((source, i))
        else:
            unmatched.append(i)
    return SyncPlan(tuple(copies), tuple(unmatched))


def _originals(variables: Sequence[VariableFacts]) -> dict[str, int]:
    found: dict[str, int] = {}
    for i, facts in enumerate(variables):
        base = _base_name(facts.name)
        # Of "w" and "tower0/w", the first is the one that get_variable made.
        if not _is_copy(facts.name) and (base not in found or facts.name == base):
            found[base] = i
    return found


def _is_copy(name: str) -> bool:
    return any(_COPY_PART.fullmatch(part) for part in name.split("/"))


def _base_name(name: str) -> str:
    parts = name.split("/")
    return "/".join(part for part in parts if not _TOWER_PART.fullmatch(part))


def _alike(one: VariableFacts, other: VariableFacts) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)

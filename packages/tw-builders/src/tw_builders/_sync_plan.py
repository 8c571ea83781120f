"""Which variable of tower 0 each replica's variable is a copy of.

Who made a variable is on record in its graph. A graph that was imported has no such
record; there local variables go by their names, and no others, since the model itself
may have a scope called ``tower1``, and its variables are global.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_COPY_PART = re.compile(r"tower[1-9]\d*")
_TOWER_PART = re.compile(r"tower\d+")


@dataclass(frozen=True)
class VariableFacts:
    """What of a variable decides whether and where it is copied from.

    Attributes:
      name: without ``":0"``.
      shape: as text, such as ``"(3, 4)"``.
      dtype: name of the dtype.
      original: name of the variable that it is a copy of; None for no copy.
    """

    name: str
    shape: str
    dtype: str
    original: str | None = None


@dataclass(frozen=True)
class SyncPlan:
    """Positions in the list of variables that the plan was made from.

    Attributes:
      copies: (from, to) pairs.
      unmatched: copies without an original of that name, shape and dtype.
    """

    copies: tuple[tuple[int, int], ...]
    unmatched: tuple[int, ...]


def plan_sync(variables: Sequence[VariableFacts]) -> SyncPlan:
    """Finds the original of every copy.

    >>> w, b = VariableFacts("w", "()", "int64"), VariableFacts("b", "()", "int64")
    >>> plan_sync([w, b, VariableFacts("tower1/w", "()", "int64", original="w")])
    SyncPlan(copies=((0, 2),), unmatched=())
    """
    originals = {v.name: i for i, v in enumerate(variables) if v.original is None}
    copies, unmatched = [], []
    for i, facts in enumerate(variables):
        if facts.original is None:
            continue
        source = originals.get(facts.original)
        if source is not None and _alike(variables[source], facts):
            copies.append((source, i))
        else:
            unmatched.append(i)
    return SyncPlan(tuple(copies), tuple(unmatched))


def originals_by_name(
    global_names: Sequence[str], local_names: Sequence[str]
) -> Mapping[str, str]:
    """Guesses originals where nobody recorded who made what.

    A copy is local and has a ``tower<k>`` part, k >= 1, in its name. Its original is
    global and has the same name without that part, or is the only one that has the
    same name without any ``tower<k>``. Where no local variable is a copy, global ones
    of such names are copies without an original.

    Args:
      global_names: names of the global variables, without ``":0"``.
      local_names: names of the local ones.

    Returns:
      Copy -> original; its own name where there is none.

    >>> originals_by_name(["w", "tower1/w"], ["tower1/w_1", "tower1/tower1/w"])
    {'tower1/w_1': 'tower1/w_1', 'tower1/tower1/w': 'tower1/w'}
    """
    copies = [name for name in local_names if _copy_part(name) is not None]
    if not copies:
        return {name: name for name in global_names if _copy_part(name) is not None}
    alike: dict[str, list[str]] = {}
    for name in global_names:
        alike.setdefault(_without_towers(name), []).append(name)
    return {name: _likely_original(name, set(global_names), alike) for name in copies}


def _likely_original(
    name: str, known: set[str], alike: Mapping[str, Sequence[str]]
) -> str:
    parts = name.split("/")
    exact = "/".join(part for i, part in enumerate(parts) if i != _copy_part(name))
    others = alike.get(_without_towers(name), ())
    if exact in known:
        return exact
    return others[0] if len(others) == 1 else name


def _copy_part(name: str) -> int | None:
    parts = name.split("/")
    found = (i for i, part in enumerate(parts) if _COPY_PART.fullmatch(part))
    return next(found, None)


def _without_towers(name: str) -> str:
    return "/".join(p for p in name.split("/") if not _TOWER_PART.fullmatch(p))


def _alike(one: VariableFacts, other: VariableFacts) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)

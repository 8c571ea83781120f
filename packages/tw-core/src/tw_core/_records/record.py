"""The record of which tower made which variable, and which are copies of which.

Names alone cannot answer this: a model may have scopes called ``tower1`` of its own,
and Keras and TensorFlow number the names they give. Slots and moving averages that are
made outside of towers follow the variable that they are named after.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

_TOWER = re.compile(r"tower\d+(_\d+)?")
_NUMBER = re.compile(r"_?\d+(_\d+)*(?=/|$)")


@dataclass(frozen=True)
class VariableOrigin:
    """Who made a variable of a graph.

    Attributes:
      tower: index of the tower that made it, or that made the variable whose slot or
        moving average it is.
      original: name of tower 0's variable of which it is the copy, without ``":0"``;
        its own name in tower 0, and where tower 0 has none.
    """

    tower: int
    original: str


@dataclass(eq=False)
class Made:
    """A variable that a tower made.

    Attributes:
      name: the variable's own, without ``":0"``.
      likely: names that tower 0's may have, the likeliest first.
      loose: its name without towers and numbers.
    """

    variable: tf.Variable
    name: str
    tower: int
    build: int
    likely: tuple[str, ...]
    loose: str


@dataclass(eq=False)
class Record:
    """What the towers of one graph made, in order.

    Attributes:
      builds: how many have begun.
      build: the one in progress, 0 outside of any.
      leftovers: variables of failed builds, by name, with their entry in the record.
    """

    builds: int = 0
    build: int = 0
    leftovers: dict[str, tuple[Any, Made | None]] = field(default_factory=dict)
    _made: dict[int, Made] = field(default_factory=dict)
    _by_name: dict[str, Made] = field(default_factory=dict)
    _origins: dict[int, VariableOrigin] | None = None

    def add(self, variable: tf.Variable, tower: int, prefix: str) -> None:
        """Notes a variable that was made below the scope ``prefix`` of a tower."""
        name = _plain_name(variable)
        likely, loose = _names_in_tower_0(name, prefix)
        self.put_back(Made(variable, name, tower, self.build, likely, loose))

    def put_back(self, made: Made) -> None:
        """Notes again what ``forget`` has returned."""
        self._made[id(made.variable)] = self._by_name[made.name] = made
        self._origins = None

    def forget(self, variable: tf.Variable) -> Made | None:
        """Forgets who made a variable, and returns it if anybody has."""
        made = self._made.pop(id(variable), None)
        self._by_name.pop(_plain_name(variable), None)
        self._origins = None
        return made

    def origin(self, variable: tf.Variable) -> VariableOrigin | None:
        """Returns who made a variable, or the one that it is named after."""
        if self._origins is None:
            self._origins = _origins(list(self._made.values()))
        return self._origins.get(id(variable)) or self._origin_of_slot(variable)

    def _origin_of_slot(self, variable: tf.Variable) -> VariableOrigin | None:
        # Named after its variable, as w/Momentum or Adam/w/m: the longest name counts.
        parts = _plain_name(variable).split("/")
        for length in range(len(parts) - 1, 0, -1):
            for i in range(len(parts) - length):
                made = self._by_name.get("/".join(parts[i : i + length]))
                if made is not None:
                    of = (self._origins or {})[id(made.variable)]
                    kept = [*parts[:i], of.original, *parts[i + length :]]
                    return VariableOrigin(of.tower, "/".join(kept))
        return None


def _origins(made: Sequence[Made]) -> dict[int, VariableOrigin]:
    """Finds tower 0's variable for each copy, by its place among those named alike."""
    alike: dict[tuple[int, str], dict[int, list[Made]]] = {}
    for one in made:
        towers = alike.setdefault((one.build, one.loose), {})
        towers.setdefault(one.tower, []).append(one)
    originals = {
        id(copy): original.name
        for towers in alike.values()
        for tower, copies in towers.items()
        if tower != 0
        for original, copy in _matches(towers.get(0, []), copies)
    }
    return {
        id(one.variable): VariableOrigin(one.tower, originals.get(id(one), one.name))
        for one in made
    }


def _matches(
    originals: Sequence[Made], copies: Sequence[Made]
) -> list[tuple[Made, Made]]:
    by_name = {original.name: original for original in originals}
    exact = [
        (by_name[name], copy)
        for copy in copies
        for name in [next((n for n in copy.likely if n in by_name), None)]
        if name is not None
    ]
    is_one_to_one = len({id(original) for original, _ in exact}) == len(copies)
    if not is_one_to_one and len(originals) == len(copies):
        return list(zip(originals, copies, strict=True))
    return exact


def _names_in_tower_0(name: str, prefix: str) -> tuple[tuple[str, ...], str]:
    """Lists likely names of tower 0's variable, and what is left without numbers."""
    outer, _, scope = prefix.rpartition("/")
    if not prefix or not name.startswith(f"{prefix}/"):
        likely: tuple[str, ...] = (name,)
    else:
        rest = name.removeprefix(f"{prefix}/")
        main = re.sub(r"^tower\d+", "tower0", scope)
        likely = (_join(outer, rest), _join(outer, main, rest))
    parts = likely[0].split("/")
    kept = [part for part in parts if not _TOWER.fullmatch(part)]
    return likely, _NUMBER.sub("", "/".join(kept))


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _plain_name(variable: Any) -> str:
    return str(variable.name).split(":")[0]

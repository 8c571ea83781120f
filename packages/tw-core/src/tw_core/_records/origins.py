"""Which tower made which variable of a graph, and what tower 0 calls its own.

Names do not tell: a model may have scopes called ``tower1`` of its own, and Keras and
TensorFlow number what they name. So contexts, policies and builders record what each
tower makes, through a variable creator, with the graph that it is made in. Slots and
moving averages that are made outside of towers follow the variable that they are named
after.

Graphs that a session runs have such a record, and those of ``wrap_function``; a graph
that was imported has none.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from tw_core._records.collections import TowerCollections
from tw_core._records.failed_builds import Leftover, take_over, undo
from tw_core._tf_compat import outermost_function_graph
from tw_core._variable_kinds import is_variable
from tw_core.checks import check_flag
from tw_core.modes import orders_effects, traces_function

# No string: TensorFlow then leaves the collection out of exported graphs.
_KEY = ("tw_core/tower_variables",)
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


def variable_origin(variable: Any) -> VariableOrigin | None:
    """Tells which tower made a variable, and of which variable it is a copy.

    Args:
      variable: a TensorFlow or Keras variable.

    Returns:
      None where no tower made it, and where the graph has no record: outside of graphs,
      and in an imported graph.

    Raises:
      TypeError: ``variable`` is none.
    """
    if not is_variable(variable):
        raise TypeError(
            f"variable_origin: wants a TensorFlow or Keras variable; got {variable!r}."
        )
    return recorded_origin(variable)


def recorded_origin(variable: Any) -> VariableOrigin | None:
    """As ``variable_origin``, of anything that has a name."""
    held = getattr(variable, "value", None)
    plain = held if isinstance(held, tf.Variable) else variable
    record = _record_of(plain)
    return None if record is None else record.origin(plain)


def has_record(variable: Any) -> bool:
    """Tells whether the graph of ``variable`` records what its towers made."""
    return _record_of(variable) is not None


@contextmanager
def record_scope(index: int, *, ns_name: str, vs_name: str) -> Iterator[None]:
    """Records the variables made inside as a tower's own.

    Args:
      index: of the tower.
      ns_name: the tower's name scope, with the scopes around it.
      vs_name: the tower's variable scope, with the scopes around it.
    """

    def note(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        variable = next_creator(**kwargs)
        if not orders_effects():
            # get_variable closes name scopes; what is made otherwise is named by them.
            is_below = f"{scope}/".startswith(f"{ns_name}/")
            prefix = ns_name if ns_name and is_below else vs_name
            _record_for(variable).add(variable, index, prefix)
        return variable

    with tf.variable_creator_scope(note):
        yield


@contextmanager
def tower_build(*, undo_on_error: bool = False) -> Iterator[None]:
    """Marks the towers built inside as copies of each other, and of no others.

    Args:
      undo_on_error: whether an exception puts the graph's collections back, so that
        nothing of a failed build is initialised, saved or run. Later builds with
        ``undo_on_error`` take over the variables that it made with ``get_variable``.

    Raises:
      TypeError: ``undo_on_error`` is no bool.
    """
    check_flag("tower_build", undo_on_error=undo_on_error)
    if orders_effects():
        yield
        return
    graph = _building_graph()
    record = _make_record(graph)
    outer = record.build
    record.builds += 1
    record.build = record.builds
    collections = TowerCollections(graph)
    try:
        with record.leftovers_found() if undo_on_error else nullcontext():
            yield
    except BaseException:
        if undo_on_error:
            record.forget(undo(graph, collections))
        raise
    finally:
        record.build = outer


@dataclass(eq=False)
class _Made:
    """A variable that a tower made.

    Attributes:
      likely: names that tower 0's may have, the likeliest first.
      loose: its name without towers and numbers.
    """

    variable: tf.Variable
    tower: int
    build: int
    likely: tuple[str, ...]
    loose: str

    @property
    def name(self) -> str:
        return _plain_name(self.variable)


@dataclass(eq=False)
class _Record:
    """What the towers of one graph made, in order."""

    made: dict[int, _Made] = field(default_factory=dict)
    builds: int = 0
    build: int = 0
    _leftovers: dict[str, tuple[Leftover, _Made | None]] = field(default_factory=dict)
    _originals: dict[int, str] | None = None
    _by_name: dict[str, _Made] = field(default_factory=dict)

    def add(self, variable: tf.Variable, tower: int, prefix: str) -> None:
        likely, loose = _names_in_tower_0(_plain_name(variable), prefix)
        self._add(_Made(variable, tower, self.build, likely, loose))

    def _add(self, made: _Made) -> None:
        self.made[id(made.variable)] = self._by_name[made.name] = made
        self._originals = None

    def forget(self, leftovers: dict[str, Leftover]) -> None:
        """Forgets who made the variables of a failed build, until they are found."""
        for name, leftover in leftovers.items():
            made = self.made.pop(id(leftover.variable), None)
            self._by_name.pop(name, None)
            self._leftovers[name] = (leftover, made)
        self._originals = None

    @contextmanager
    def leftovers_found(self) -> Iterator[None]:
        """Lets ``get_variable`` find the variables of failed builds."""

        def find(getter: Callable[..., Any], name: str, **asked: Any) -> Any:
            if name not in self._leftovers:
                return getter(name, **asked)
            leftover, made = self._leftovers[name]
            variable = take_over(leftover, getter, name, asked)
            del self._leftovers[name]
            if made is not None:
                self._add(replace(made, build=self.build))
            return variable

        v1 = tf.compat.v1
        with v1.variable_scope(
            v1.get_variable_scope(), custom_getter=find, auxiliary_name_scope=False
        ):
            yield

    def origin(self, variable: tf.Variable) -> VariableOrigin | None:
        made = self.made.get(id(variable))
        if made is not None:
            return VariableOrigin(made.tower, self._original(made))
        return self._origin_of_slot(_plain_name(variable))

    def _origin_of_slot(self, name: str) -> VariableOrigin | None:
        # Named after its variable, as w/Momentum or Adam/w/m: the longest name counts.
        parts = name.split("/")
        for length in range(len(parts) - 1, 0, -1):
            for i in range(len(parts) - length):
                made = self._by_name.get("/".join(parts[i : i + length]))
                if made is not None:
                    kept = [*parts[:i], self._original(made), *parts[i + length :]]
                    return VariableOrigin(made.tower, "/".join(kept))
        return None

    def _original(self, made: _Made) -> str:
        if self._originals is None:
            self._originals = _originals(list(self.made.values()))
        return self._originals.get(id(made.variable), made.name)


def _originals(made: Sequence[_Made]) -> dict[int, str]:
    """Finds tower 0's variable for each copy, by its place among those named alike."""
    alike: dict[tuple[int, str], dict[int, list[_Made]]] = {}
    for one in made:
        towers = alike.setdefault((one.build, one.loose), {})
        towers.setdefault(one.tower, []).append(one)
    return {
        id(copy.variable): original.name
        for towers in alike.values()
        for tower, copies in towers.items()
        if tower != 0
        for original, copy in _matches(towers.get(0, []), copies)
    }


def _matches(
    originals: Sequence[_Made], copies: Sequence[_Made]
) -> list[tuple[_Made, _Made]]:
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


def _record_of(variable: Any) -> _Record | None:
    graph = _graph_of(variable)
    found = graph.get_collection(_KEY) if graph is not None else []
    return found[0] if found else None


def _record_for(variable: tf.Variable) -> _Record:
    return _make_record(_graph_of(variable) or _building_graph())


def _make_record(graph: tf.Graph) -> _Record:
    records: list[_Record] = graph.get_collection_ref(_KEY)
    if not records:
        records.append(_Record())
    return records[0]


def _building_graph() -> tf.Graph:
    """Returns the graph that the towers belong to, whatever body is being built."""
    if traces_function():
        return outermost_function_graph()
    with tf.init_scope():
        return tf.compat.v1.get_default_graph()


def _graph_of(variable: Any) -> tf.Graph | None:
    """Returns a variable's graph; a function's variables are of no graph themselves."""
    graph = getattr(variable, "graph", None)
    if graph is None and traces_function():
        return outermost_function_graph()
    return graph

"""Records which tower made each variable of a graph, and which are copies of which.

Contexts, policies and builders record the variables that each tower makes, through a
variable creator, in their graph. Names alone are not enough: a model may have its own
scopes called ``tower1``, and Keras and TensorFlow number the names they give. Slots and
moving averages that are made outside of towers belong to the tower of the variable that
they are named after.

Graphs that a session runs have such a record, and so do those of ``wrap_function``; an
imported graph has none, and neither do variables outside of graphs. Only names are
known there: replicas are called ``tower1/w``.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from tw_core._modes import builds_session_graph, orders_effects, traces_function
from tw_core._tf_compat import outermost_function_graph
from tw_core._variable_kinds import make_local, plain_name

# Not a string, so that TensorFlow leaves the collection out of exported graphs.
_KEY = ("tw_core/tower_variables",)

_TOWER_PREFIX = re.compile(r"(^|/)tower\d+(?=/)")
_TOWER_SCOPE = re.compile(r"tower\d+(_\d+)?")
_NUMBER = re.compile(r"_?\d+(_\d+)*(?=/|$)")

_log = logging.getLogger("tw_core")
_threads = threading.local()


@dataclass(frozen=True, eq=False)
class TowerScope:
    """The scopes in which a tower's variables are being made."""

    index: int
    ns_name: str  # name scope, with the scopes around it
    vs_name: str  # variable scope, with the scopes around it
    total: int = 0  # number of towers; 0 if unknown

    def prefix(self) -> str:
        """Returns the prefix of variables that the tower makes here and now."""
        # get_variable closes name scopes; other variables are named by them.
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        is_below = f"{scope}/".startswith(f"{self.ns_name}/")
        return self.ns_name if self.ns_name and is_below else self.vs_name

    def shared_name(self, name: str) -> str:
        """Returns the name of a variable made here and now, without the tower in it."""
        prefix = self.prefix()
        outer, _, scope = prefix.rpartition("/")
        if _TOWER_SCOPE.fullmatch(scope) and name.startswith(f"{prefix}/"):
            return _join(outer, name.removeprefix(f"{prefix}/"))
        return name


@dataclass(frozen=True)
class VariableOrigin:
    """The tower that made a variable of a graph.

    Attributes:
      tower: index of the tower that made it, or that made the variable whose slot or
        moving average it is.
      original: name of tower 0's variable of which it is a copy, without ``":0"``; its
        own name if it is tower 0's, or tower 0 has no such variable.
    """

    tower: int
    original: str


@dataclass(eq=False)
class Made:
    """A variable that a tower made."""

    variable: tf.Variable
    name: str  # without ":0"
    tower: int
    build: int
    likely: tuple[str, ...]  # names that tower 0's may have, the likeliest first
    loose: str  # its name without towers and numbers
    # A tower may keep data in local variables that it numbers itself: their numbers
    # then distinguish towers.
    is_local: bool


@dataclass(eq=False)
class Record:
    """The variables that the towers of one graph made, in order."""

    builds: int = 0  # begun so far
    build: int = 0  # the one in progress; 0 outside of any
    # Of failed builds, by name, with their entries.
    leftovers: dict[str, tuple[Any, Made | None]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)  # variables already warned about
    _made: dict[int, Made] = field(default_factory=dict)
    _by_name: dict[str, Made] = field(default_factory=dict)
    _origins: dict[int, VariableOrigin] | None = None

    def add(
        self, variable: tf.Variable, tower: int, prefix: str, *, is_local: bool
    ) -> None:
        """Records a variable that a tower made below its scope ``prefix``."""
        name = plain_name(variable)
        likely, loose = _names_in_tower_0(name, prefix)
        self.put_back(Made(variable, name, tower, self.build, likely, loose, is_local))

    def put_back(self, made: Made) -> None:
        """Restores an entry that ``forget`` returned."""
        self._made[id(made.variable)] = self._by_name[made.name] = made
        self._origins = None

    def forget(self, variable: tf.Variable) -> Made | None:
        """Removes the entry of a variable and returns it; None if there is none."""
        made = self._made.pop(id(variable), None)
        self._by_name.pop(plain_name(variable), None)
        self._origins = None
        return made

    def hand_over(self, old: tf.Variable, new: tf.Variable) -> None:
        """Replaces ``old`` with ``new``, if ``old`` is recorded."""
        made = self.forget(old)
        if made is not None:
            self.put_back(replace(made, variable=new))

    def origin(self, variable: tf.Variable) -> VariableOrigin | None:
        """Returns the origin of a variable, or of the one that it is named after."""
        if self._origins is None:
            self._origins = _origins(list(self._made.values()))
        return self._origins.get(id(variable)) or self._origin_of_slot(variable)

    def _origin_of_slot(self, variable: tf.Variable) -> VariableOrigin | None:
        # Named after its variable, as w/Momentum or Adam/w/m: the longest match counts.
        parts = plain_name(variable).split("/")
        for length in range(len(parts) - 1, 0, -1):
            for i in range(len(parts) - length):
                made = self._by_name.get("/".join(parts[i : i + length]))
                if made is not None:
                    of = (self._origins or {})[id(made.variable)]
                    kept = [*parts[:i], of.original, *parts[i + length :]]
                    return VariableOrigin(of.tower, "/".join(kept))
        return None


def variable_origin(variable: Any) -> VariableOrigin | None:
    """Returns which tower made a variable, and of which variable it is a copy.

    Args:
      variable: a TensorFlow or Keras variable.

    Returns:
      None where no tower made it, and where the graph has no record: outside of graphs,
      and in an imported graph.

    Raises:
      TypeError: ``variable`` is not one.
    """
    [origin] = variable_origins([variable])
    return origin


def variable_origins(variables: Iterable[Any]) -> list[VariableOrigin | None]:
    """As ``variable_origin``, for each of several variables.

    Args:
      variables: [N] TensorFlow and Keras variables.

    Returns:
      [N] origins, or None as in ``variable_origin``.

    Raises:
      TypeError: something that is not a variable.
    """
    variables = list(variables)
    others = [v for v in variables if not isinstance(_held(v), tf.Variable)]
    if others:
        raise TypeError(
            "Every variable must be a TensorFlow or Keras variable; got "
            f"{', '.join(map(repr, others))}."
        )
    return _recorded_origins(variables)


def recorded_origin(variable: Any) -> VariableOrigin | None:
    """As ``variable_origin``, for anything that has a name."""
    [origin] = _recorded_origins([variable])
    return origin


def base_name(variable: Any) -> str:
    """Returns a variable's name in tower 0; if unknown, without a tower's prefix."""
    [name] = base_names([variable])
    return name


def base_names(variables: Iterable[Any]) -> list[str]:
    """As ``base_name``, for each of several variables."""
    variables = list(variables)
    return [
        _TOWER_PREFIX.sub("", _path(variable).split(":")[0]).lstrip("/")
        if origin is None
        else origin.original
        for variable, origin in zip(
            variables, _recorded_origins(variables), strict=True
        )
    ]


def _recorded_origins(variables: Sequence[Any]) -> list[VariableOrigin | None]:
    plain = [_held(variable) for variable in variables]
    graphs = [getattr(variable, "graph", None) for variable in plain]
    # In a trace variables have no graph: the trace's graph has the record.
    in_trace = None in graphs and traces_function()
    traced = outermost_function_graph() if in_trace else None
    records = [_record_in(graph or traced) for graph in graphs]
    return [
        None if record is None else record.origin(variable)
        for record, variable in zip(records, plain, strict=True)
    ]


def _held(variable: Any) -> Any:
    held = getattr(variable, "value", None)
    return held if isinstance(held, tf.Variable) else variable


def owning_tower(variable: Any) -> int:
    """Returns the index of the tower that owns a variable; 0 where no tower made it."""
    origin = recorded_origin(variable)
    if origin is not None:
        return origin.tower
    found = _may_be_a_replica(variable) and _TOWER_PREFIX.search(variable.name)
    return int(found[0].rpartition("tower")[2]) if found else 0


def is_of_a_tower(variable: Any) -> bool:
    """Returns whether a variable's record or name assigns it to a tower."""
    if recorded_origin(variable) is not None:
        return True
    return _TOWER_PREFIX.search(_path(variable)) is not None


def without_numbers(name: str) -> str:
    """Removes the numbers by which Keras and TensorFlow make names unique."""
    return _NUMBER.sub("", name)


@contextmanager
def record_scope(
    index: int,
    *,
    ns_name: str,
    vs_name: str,
    total: int = 0,
    are_local: bool = False,
) -> Iterator[None]:
    """Records the variables made inside as a tower's own; makes them local if asked."""
    opened = TowerScope(index, ns_name, vs_name, total)
    entered = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    is_recorded_here = not orders_effects()
    with_tower: list[str] = []  # names that contain the tower's name scope

    def note(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        prefix = opened.prefix()
        variable = next_creator(**kwargs)
        if are_local:
            make_local(variable)
        is_here = tf.compat.v1.get_default_graph() is entered
        if is_recorded_here if is_here else not orders_effects():
            record = make_record(getattr(variable, "graph", None) or building_graph())
            collections = kwargs.get("collections") or ()
            is_local = tf.compat.v1.GraphKeys.LOCAL_VARIABLES in collections
            record.add(variable, index, prefix, is_local=is_local)
            if ns_name and prefix == ns_name:
                with_tower.append(plain_name(variable))
        return variable

    scopes = _open_scopes()
    scopes.append(opened)
    try:
        with tf.variable_creator_scope(note):
            yield
    finally:
        scopes.remove(opened)
    if with_tower and builds_session_graph():
        _warn_of_names(opened, with_tower)


def _warn_of_names(tower: TowerScope, names: Sequence[str]) -> None:
    """Warns of variables saved under names that a model without towers lacks."""
    # Copies, which are local by now, are not saved.
    saved = {plain_name(v) for v in tf.compat.v1.global_variables()}
    told = make_record(tf.compat.v1.get_default_graph()).told
    outer = tower.ns_name.rpartition("/")[0]
    portable = {
        name: _join(outer, name.removeprefix(f"{tower.ns_name}/"))
        for name in names
        if name in saved - told and name.startswith(f"{tower.ns_name}/")
    }
    if portable:
        told.update(portable)
        _log.warning(
            "%s: checkpoints will hold %s, with the tower's name scope in the name, "
            "which the same model without towers calls %s. For the same names in both, "
            "make variables with tf.compat.v1.get_variable, not tf.Variable.",
            tower.ns_name,
            ", ".join(portable),
            ", ".join(portable.values()),
        )


def open_tower_scope() -> TowerScope | None:
    """Returns this thread's innermost open tower scope; None outside of towers."""
    scopes = _open_scopes()
    return scopes[-1] if scopes else None


def _open_scopes() -> list[TowerScope]:
    if not hasattr(_threads, "scopes"):
        _threads.scopes = []
    return _threads.scopes  # type: ignore[no-any-return]


def make_record(graph: tf.Graph) -> Record:
    """Returns the record of a graph, which is made on first use."""
    records: list[Record] = graph.get_collection_ref(_KEY)
    if not records:
        records.append(Record())
    return records[0]


def build_in_progress() -> int:
    """Returns the number of the build of towers in progress; 0 outside of any."""
    record = None if orders_effects() else _record_in(building_graph())
    return 0 if record is None else record.build


def building_graph() -> tf.Graph:
    """Returns the graph that the towers belong to, even while a body is built."""
    if traces_function():
        return outermost_function_graph()
    with tf.init_scope():
        return tf.compat.v1.get_default_graph()


def _record_in(graph: tf.Graph | None) -> Record | None:
    found = graph.get_collection(_KEY) if graph is not None else []
    return found[0] if found else None


def _may_be_a_replica(variable: Any) -> bool:
    # Replicas are local variables; a scope of the model may also be called tower1.
    graph = getattr(variable, "graph", None)
    if graph is None:
        in_trace = traces_function() and _record_in(outermost_function_graph())
        return not in_trace
    if _record_in(graph) is not None:
        return False
    local = graph.get_collection(tf.compat.v1.GraphKeys.LOCAL_VARIABLES)
    return any(variable is other for other in local)


def _origins(made: Sequence[Made]) -> dict[int, VariableOrigin]:
    """Finds tower 0's variable for each copy, by its position among similar names."""
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
    has_local = any(made.is_local for made in (*originals, *copies))
    if is_one_to_one or has_local or len(originals) != len(copies):
        return exact
    return list(zip(originals, copies, strict=True))


def _names_in_tower_0(name: str, prefix: str) -> tuple[tuple[str, ...], str]:
    """Returns likely names of tower 0's variable, and the name without numbers."""
    outer, _, scope = prefix.rpartition("/")
    if not prefix or not name.startswith(f"{prefix}/"):
        likely: tuple[str, ...] = (name,)
    else:
        rest = name.removeprefix(f"{prefix}/")
        main = re.sub(r"^tower\d+", "tower0", scope)
        likely = (_join(outer, rest), _join(outer, main, rest))
    parts = likely[0].split("/")
    kept = [part for part in parts if not _TOWER_SCOPE.fullmatch(part)]
    return likely, without_numbers("/".join(kept))


def _join(*parts: str) -> str:
    return "/".join(filter(None, parts))


def _path(variable: Any) -> str:
    # A Keras variable's name is the last part of its path only.
    return str(getattr(variable, "path", None) or variable.name)

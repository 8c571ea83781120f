"""Recording which tower makes which variable of a graph, and asking for it.

Contexts, policies and builders record what each tower makes, through a variable
creator, with the graph that it is made in.

Graphs that a session runs have such a record, and those of ``wrap_function``; a graph
that was imported has none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tw_core._records.collections import TowerCollections
from tw_core._records.failed_builds import take_over, undo
from tw_core._records.record import Record, VariableOrigin
from tw_core._tf_compat import outermost_function_graph
from tw_core._variable_kinds import is_variable
from tw_core.checks import check_flag
from tw_core.modes import orders_effects, traces_function

# No string: TensorFlow then leaves the collection out of exported graphs.
_KEY = ("tw_core/tower_variables",)


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
    """Returns whether the graph of ``variable`` records what its towers made."""
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
            record = _make_record(getattr(variable, "graph", None) or _building_graph())
            record.add(variable, index, prefix)
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
      TypeError: ``undo_on_error`` is not a bool.
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
        with _leftovers_found(record) if undo_on_error else nullcontext():
            yield
    except BaseException:
        if undo_on_error:
            for name, leftover in undo(graph, collections).items():
                record.leftovers[name] = leftover, record.forget(leftover.variable)
        raise
    finally:
        record.build = outer


@contextmanager
def _leftovers_found(record: Record) -> Iterator[None]:
    """Lets ``get_variable`` find the variables of failed builds."""

    def find(getter: Callable[..., Any], name: str, **asked: Any) -> Any:
        if name not in record.leftovers:
            return getter(name, **asked)
        leftover, made = record.leftovers[name]
        variable = take_over(leftover, getter, name, asked)
        del record.leftovers[name]
        if made is not None:
            record.put_back(replace(made, build=record.build))
        return variable

    v1 = tf.compat.v1
    with v1.variable_scope(
        v1.get_variable_scope(), custom_getter=find, auxiliary_name_scope=False
    ):
        yield


def _record_of(variable: Any) -> Record | None:
    graph = getattr(variable, "graph", None)
    if graph is None and traces_function():  # whose variables are of no graph
        graph = outermost_function_graph()
    found = graph.get_collection(_KEY) if graph is not None else []
    return found[0] if found else None


def _make_record(graph: tf.Graph) -> Record:
    records: list[Record] = graph.get_collection_ref(_KEY)
    if not records:
        records.append(Record())
    return records[0]


def _building_graph() -> tf.Graph:
    """Returns the graph that the towers belong to, whatever body is being built."""
    if traces_function():
        return outermost_function_graph()
    with tf.init_scope():
        return tf.compat.v1.get_default_graph()

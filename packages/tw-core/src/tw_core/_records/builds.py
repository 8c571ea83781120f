"""Builds of towers: their variables are copies of each other, and a failure is undone.

A build that fails leaves its graph as it was, as far as possible. Ops cannot be removed
from a graph, but they can be removed from its collections: those of a failed build are
then not initialised, saved, summarised or run with UPDATE_OPS. A variable of
``get_variable`` keeps its name for good; the next build that asks for that name gets
the existing variable, with the initial value and regularizer it asks for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from tw_core._checks import check_flag
from tw_core._modes import orders_effects
from tw_core._records.collections import TowerCollections
from tw_core._records.initial_values import initial_value, regularize
from tw_core._records.origins import Record, building_graph, make_record
from tw_core._tf_compat import set_initializer
from tw_core._variable_kinds import plain_name

_KEYS = tf.compat.v1.GraphKeys


class _Leftover(NamedTuple):
    """A variable that a failed build made."""

    variable: tf.Variable
    keys: tuple[str, ...]  # of the collections that it was in


@contextmanager
def tower_build(*, undo_on_error: bool = False) -> Iterator[None]:
    """Marks the towers built inside as copies of each other, and of no others.

    Args:
      undo_on_error: whether an exception restores the graph's collections, so that
        nothing of a failed build is initialised, saved or run. Later builds with
        ``undo_on_error`` take over the variables that it made with ``get_variable``.

    Raises:
      TypeError: ``undo_on_error`` is not a bool.
    """
    check_flag(undo_on_error=undo_on_error)
    if orders_effects():
        yield
        return
    graph = building_graph()
    record = make_record(graph)
    outer = record.build
    record.builds += 1
    record.build = record.builds
    collections = TowerCollections(graph)
    try:
        with _leftovers_found(record) if undo_on_error else nullcontext():
            yield
    except BaseException:
        if undo_on_error:
            for name, leftover in _undo(graph, collections).items():
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
        variable = _take_over(leftover, getter, name, asked)
        del record.leftovers[name]
        if made is not None:
            record.put_back(replace(made, build=record.build))
        return variable

    v1 = tf.compat.v1
    with v1.variable_scope(
        v1.get_variable_scope(), custom_getter=find, auxiliary_name_scope=False
    ):
        yield


def _undo(graph: tf.Graph, collections: TowerCollections) -> dict[str, _Leftover]:
    """Restores the collections after a failed build; returns its variables by name."""
    added = {key: collections.added(key) for key in graph.get_all_collection_keys()}
    # A global step stays: TensorFlow finds it by its collection.
    kept = {id(item) for item in graph.get_collection(_KEYS.GLOBAL_STEP)}
    leftovers: dict[str, _Leftover] = {}
    for key, items in added.items():
        gone = {id(item) for item in items} - kept
        collection = graph.get_collection_ref(key)
        collection[:] = [item for item in collection if id(item) not in gone]
        for item in items:
            if id(item) in gone and isinstance(item, tf.Variable):
                name = plain_name(item)
                keys = leftovers[name].keys if name in leftovers else ()
                leftovers[name] = _Leftover(item, (*keys, key))
    return leftovers


def _take_over(
    leftover: _Leftover, getter: Callable[..., Any], name: str, asked: dict[str, Any]
) -> tf.Variable:
    """Returns a failed build's variable to ``get_variable``, as if newly made."""
    variable = leftover.variable
    if getattr(variable, "handle", None) is None:
        raise ValueError(
            f"get_variable: {name!r} was made by a build that failed, and is part of a "
            "flat variable of that build, which no other build can complete; use "
            "another name or a new tf.Graph()."
        )
    _check_same(variable, name, asked)
    dtype = variable.dtype.base_dtype
    found = getter(name, **(asked | {"reuse": True, "dtype": dtype}))
    for key in leftover.keys:
        variable.graph.add_to_collection(key, variable)
    first = initial_value(name, asked.get("shape"), dtype, asked.get("initializer"))
    with tf.init_scope(), tf.device(variable.device), tf.name_scope(f"{name}/"):
        value = first.value() if callable(first.value) else first.value
        set_initializer(variable, variable.assign(value, read_value=False))
    if asked.get("regularizer") is not None:
        regularize(variable, name, asked["regularizer"])
    return found


def _check_same(variable: tf.Variable, name: str, asked: dict[str, Any]) -> None:
    shape, given = asked.get("shape"), asked.get("initializer")
    if shape is None and given is not None and not callable(given):
        shape = tf.convert_to_tensor(given).shape
    shape, dtype = tf.TensorShape(shape), asked.get("dtype")
    trainable = asked.get("trainable")
    # Without a shape the dtype is the scope's default, not one asked for.
    is_asked = dtype is not None and asked.get("shape") is not None
    is_cast = is_asked and tf.as_dtype(dtype).base_dtype != variable.dtype.base_dtype
    other = [
        f"{key} {wanted} (it has {getattr(variable, key)})"
        for key, wanted, is_other in (
            ("shape", shape, not variable.shape.is_compatible_with(shape)),
            ("dtype", dtype, is_cast),
            ("trainable", trainable, trainable not in (None, variable.trainable)),
        )
        if is_other
    ]
    if other:
        raise ValueError(
            f"get_variable: {name!r} was made by a build that failed, and is requested "
            f"with another {', '.join(other)}; use another name or a new tf.Graph()."
        )

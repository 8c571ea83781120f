"""A build that fails leaves its graph as it was, as far as a graph can be.

Ops cannot be taken out of a graph, but they can be taken out of its collections: what
failed is then not initialised, saved, summarised or run with UPDATE_OPS. A variable of
``get_variable`` keeps its name for good; the next build that asks for that name gets
the variable that is there, with the initial value and regularizer it asks for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tw_core._records.collections import TowerCollections
from tw_core._records.initial_values import initial_value, regularize
from tw_core._tf_compat import set_initializer

_KEYS = tf.compat.v1.GraphKeys


class Leftover(NamedTuple):
    """A variable that a failed build has made.

    Attributes:
      variable: which.
      keys: the collections that it was in.
    """

    variable: tf.Variable
    keys: tuple[str, ...]


def undo(graph: tf.Graph, collections: TowerCollections) -> dict[str, Leftover]:
    """Puts the collections back as they were before a build that failed.

    Args:
      graph: the graph.
      collections: its collections as they were noted before.

    Returns:
      Name -> variable, for those that the build made. A global step stays where it is,
      since TensorFlow finds it by its collection.
    """
    added = {key: collections.added(key) for key in graph.get_all_collection_keys()}
    kept = {id(item) for item in graph.get_collection(_KEYS.GLOBAL_STEP)}
    leftovers: dict[str, Leftover] = {}
    for key, items in added.items():
        gone = {id(item) for item in items} - kept
        collection = graph.get_collection_ref(key)
        collection[:] = [item for item in collection if id(item) not in gone]
        for item in items:
            if id(item) in gone and isinstance(item, tf.Variable):
                name = item.name.split(":")[0]
                keys = leftovers[name].keys if name in leftovers else ()
                leftovers[name] = Leftover(item, (*keys, key))
    return leftovers


def take_over(
    leftover: Leftover, getter: Callable[..., Any], name: str, asked: dict[str, Any]
) -> tf.Variable:
    """Gives ``get_variable`` the variable of a failed build, as if it were made now.

    Args:
      leftover: what the failed build has made under that name.
      getter: TensorFlow's.
      name: the variable's.
      asked: the other arguments of ``get_variable``.

    Raises:
      ValueError: another shape, dtype or ``trainable`` is asked for.
    """
    variable = leftover.variable
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


def _asked_shape(asked: dict[str, Any]) -> tf.TensorShape:
    given = asked.get("initializer")
    if asked.get("shape") is not None or given is None or callable(given):
        return tf.TensorShape(asked.get("shape"))
    return tf.convert_to_tensor(given).shape


def _check_same(variable: tf.Variable, name: str, asked: dict[str, Any]) -> None:
    wanted = {
        "shape": _asked_shape(asked),
        "dtype": asked.get("dtype"),
        "trainable": asked.get("trainable"),
    }
    other = [
        f"{key} {wanted[key]} (it has {getattr(variable, key)})"
        for key, is_other in {
            "shape": not variable.shape.is_compatible_with(wanted["shape"]),
            "dtype": wanted["dtype"] is not None
            and asked.get("shape") is not None
            and tf.as_dtype(wanted["dtype"]).base_dtype != variable.dtype.base_dtype,
            "trainable": wanted["trainable"] not in (None, variable.trainable),
        }.items()
        if is_other
    ]
    if other:
        raise ValueError(
            f"get_variable: {name!r} was made by a build that failed, and is asked for "
            f"with another {', '.join(other)}; take another name or a new tf.Graph()."
        )

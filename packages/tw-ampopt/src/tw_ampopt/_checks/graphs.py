"""Where a tensor can be used: in its graph, and in what is built within that."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tw_core import builds_session_graph
from tw_core.gradients import values_of
from tw_core.variables import is_variable, tf_variable


def graphs_around(graph: tf.Graph) -> Iterator[tf.Graph]:
    """Yields a graph, then the one in which it is a branch, loop or function, ..."""
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def check_same_graph(values: Mapping[str, Any], *, caller: str) -> None:
    """Refuses tensors and variables that ops made now cannot use.

    Args:
      values: what is to be used, by what it is called in the message.
      caller: who asks; opens the message.

    Raises:
      ValueError: some belong to another graph, or to a branch, loop or function
        that is not being built.
    """
    is_eager = tf.executing_eagerly()
    usable = [] if is_eager else [*graphs_around(tf.compat.v1.get_default_graph())]
    foreign = [name for name, value in values.items() if not _is_usable(value, usable)]
    if foreign:
        raise ValueError(
            f"{caller}: everything must belong to the graph that is being built; got "
            f"{', '.join(foreign)} of another graph, of eager mode, or of a tf.cond "
            "branch, a loop or a function that is finished. Build both in one place."
        )


def _is_usable(value: Any, usable: Sequence[tf.Graph]) -> bool:
    value = tf_variable(value).handle if is_variable(value) else values_of(value)
    if not isinstance(value, tf.Tensor):
        return True
    try:
        graph = value.graph
    except AttributeError:  # an eager tensor has none
        return not builds_session_graph()
    return any(graph is other for other in usable)

"""Where a tensor can be used: in its graph, and in what is built within that."""

from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf


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
    if tf.executing_eagerly():
        usable: list[tf.Graph] = []
    else:
        usable = list(graphs_around(tf.compat.v1.get_default_graph()))
    strangers = [
        name
        for name, value in values.items()
        if _graph_of(value) not in (None, *usable)
    ]
    if strangers:
        raise ValueError(
            f"{caller}: wants what belongs to the graph that is being built; got "
            f"{', '.join(strangers)} of another graph, or of a tf.cond branch, a loop "
            "or a function that is finished. Build both in one place."
        )


def _graph_of(value: Any) -> tf.Graph | None:
    if isinstance(value, tf.IndexedSlices):
        value = value.values
    try:
        return value.graph
    except AttributeError:  # eager tensors have none
        return None

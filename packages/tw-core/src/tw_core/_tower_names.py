"""The name scope of a tower, which is exactly the tower's name.

TensorFlow makes a scope's name unique without a word, and below an open scope it
becomes part of that one; handles would then look for tensors under a name that
nothing has.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf


@contextmanager
def tower_name_scope(graph: tf.Graph, name: str, *, caller: str) -> Iterator[None]:
    """Opens the name scope ``name`` of ``graph``, whatever scope is open.

    Args:
      graph: the tower's graph.
      name: no name opens nothing. The scope that is open already, as in
        ``Tower.scope()``, is used as it is.
      caller: which tower; opens the message.

    Raises:
      ValueError: another scope or op of the graph has the name, or the tower
        has no name and a scope is open.
    """
    open_scope = graph.get_name_scope()
    if name == open_scope:
        yield
        return
    if not name:
        raise ValueError(
            f"{caller}: a tower without a name cannot be entered in the name scope "
            f"{open_scope!r}, which its tensors' names would begin with; enter it "
            "outside, or name it."
        )
    with graph.name_scope(None):
        _check_is_free(graph, name, caller)
        with graph.name_scope(name):
            yield


def _check_is_free(graph: tf.Graph, name: str, caller: str) -> None:
    unique = graph.unique_name(name, mark_as_used=False)
    if unique != name:
        raise ValueError(
            f"{caller}: the graph has something named {name!r} already, so that the "
            f"tower's ops would be named {unique!r}; give the tower another name."
        )

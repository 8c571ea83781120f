"""Which tower is being built, in this thread and for this graph.

Two threads may build two graphs, and one thread may open a second graph inside a
tower of the first; so the current tower is no module global. The bodies of
``tf.cond``, ``tf.while_loop`` and functions belong to the graph around them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import tensorflow as tf

from tw_core._autograph import without_autograph

if TYPE_CHECKING:
    from tw_core._base_tower_context import BaseTowerContext


class _Entered(threading.local):
    """The towers that this thread is inside of, with their graphs."""

    towers: "tuple[tuple[tf.Graph, BaseTowerContext], ...]" = ()


_entered = _Entered()


@without_autograph
def get_current_tower_context() -> "BaseTowerContext | None":
    """Returns the tower entered in this thread for the graph being built.

    Inside the body of a ``tf.cond``, ``tf.while_loop`` or ``tf.function`` that
    a tower builds, it is that tower.

    Returns:
      The context, or None outside of towers.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        for entered_graph, tower in _entered.towers:
            if entered_graph is graph:
                return tower
        graph = getattr(graph, "outer_graph", None)
    return None


@contextmanager
def current_tower(graph: tf.Graph, tower: "BaseTowerContext") -> Iterator[None]:
    """Makes ``tower`` the current one of this thread for ``graph``."""
    _entered.towers = (*_entered.towers, (graph, tower))
    try:
        yield
    finally:
        _entered.towers = tuple(t for t in _entered.towers if t[1] is not tower)

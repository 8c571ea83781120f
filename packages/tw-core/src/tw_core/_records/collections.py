"""The items that a tower adds to collections, and those removed when it closes.

A graph's collections are lists that any code appends to. Their contents are recorded
when the tower opens; when it closes, items added in between are recorded too, and the
frozen collections are restored. Build one graph in one thread: threads that build
towers of it at the same time would see each other's additions.

The frozen collections other than the summaries are recorded in a collection of the
graph: graphs do not share it, and an exported graph keeps it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tw_core._checks import check_flag

_KEYS = tf.compat.v1.GraphKeys
_FROZEN = "tw_core/frozen_collections"
# A callback of tensorpack 0.11 runs all of the second in every training step: ops that
# add_moving_summary adds in an inference tower would need that tower's inputs there.
_ALWAYS_FROZEN = (str(_KEYS.SUMMARIES), "MOVING_SUMMARY_OPS")


def freeze_collections(*keys: str, graph: tf.Graph | None = None) -> None:
    """Makes towers leave more of a graph's collections unchanged.

    From now on, all towers of the graph but the main training tower treat these
    collections like the summaries: items that such a tower adds are removed when it
    closes. ``get_collection_in_tower`` still lists them.

    Args:
      keys: names of collections, such as tensorpack's ``"MOVING_SUMMARY_OPS"``.
        Naming one twice is the same as naming it once.
      graph: a session graph, or that of a ``tf.function`` being traced; the
        default graph by default.

    Raises:
      ValueError: no key.
      TypeError: a key that is not a string.
      RuntimeError: in eager mode, without a graph.
    """
    if not keys:
        raise ValueError("freeze_collections: name at least one collection; got none.")
    wrong = [key for key in keys if not isinstance(key, str)]
    if wrong:
        raise TypeError(
            f"freeze_collections: collections are named by strings; got {wrong}."
        )
    if graph is None:
        if tf.executing_eagerly():
            raise RuntimeError(
                "freeze_collections: collections belong to a graph; got eager mode. "
                "Call it inside tf.Graph().as_default() or a tf.function."
            )
        graph = tf.compat.v1.get_default_graph()
    known = frozen_keys(graph)
    for key in dict.fromkeys(keys):
        if key not in known:
            graph.add_to_collection(_FROZEN, key)


def frozen_keys(graph: tf.Graph | None) -> tuple[str, ...]:
    """Lists the collections that only the main training tower of ``graph`` adds to."""
    keys = list(_ALWAYS_FROZEN)
    for own in with_outer_graphs(graph):
        # An imported graph holds bytes where the exported one held strings.
        keys += map(tf.compat.as_str, own.get_collection(_FROZEN))
    return tuple(dict.fromkeys(keys))


def with_outer_graphs(graph: tf.Graph | None) -> list[tf.Graph]:
    """Lists a graph and those around it, to which a function's body belongs."""
    found = []
    while graph is not None:
        found.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return found


@contextmanager
def leave_no_summaries(enable: bool = True) -> Iterator[None]:
    """Removes the items that are added inside to the graph's frozen collections.

    These are the summaries and those that ``freeze_collections`` named; for code that
    is run once per tower, outside of the towers. In eager mode there are none.

    Args:
      enable: False does nothing.

    Raises:
      TypeError: ``enable`` is not a bool.
    """
    check_flag(enable=enable)
    if not enable or tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    collections = TowerCollections(graph, frozen_keys(graph))
    try:
        yield
    finally:
        collections.close()


class TowerCollections:
    """The difference between a graph's collections before and after a tower."""

    def __init__(self, graph: tf.Graph, frozen_keys: Iterable[str] = ()) -> None:
        """Notes the contents of every collection of ``graph``."""
        self._graph = graph
        self._frozen_keys = tuple(frozen_keys)
        keys = graph.get_all_collection_keys()
        self._before = {key: graph.get_collection(key) for key in keys}
        self._added: dict[str, list[Any]] | None = None

    def added(self, key: str) -> list[Any]:
        """Lists the items that the tower added to collection ``key``, in order.

        After ``close`` the list no longer changes, and includes items that were removed
        from a frozen collection.
        """
        if self._added is not None:
            return list(self._added.get(key, []))
        before = {id(item) for item in self._before.get(key, [])}
        return [
            item for item in self._graph.get_collection(key) if id(item) not in before
        ]

    def close(self) -> None:
        """Records the additions and restores the frozen collections."""
        keys = self._graph.get_all_collection_keys()
        self._added = {key: self.added(key) for key in keys}
        for key in self._frozen_keys:
            if key in self._before:
                self._graph.get_collection_ref(key)[:] = self._before[key]
            elif key in keys:
                self._graph.clear_collection(key)

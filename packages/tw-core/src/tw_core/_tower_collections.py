"""What a tower adds to its graph's collections, and what it may not leave there.

A graph's collections are lists that everybody appends to. Their contents are
noted when the tower opens; when it closes, what came in between is kept and the
frozen ones are put back. Threads that build towers of one graph at the same time
see each other's additions; one graph is built by one thread.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


class TowerCollections:
    """The difference between a graph's collections before and after a tower."""

    def __init__(self, graph: tf.Graph, frozen_keys: Iterable[str] = ()) -> None:
        """Notes the contents of every collection of ``graph``.

        Args:
          graph: the tower's graph.
          frozen_keys: collections that ``close`` puts back as they were.
        """
        self._graph = graph
        self._frozen_keys = tuple(frozen_keys)
        keys = graph.get_all_collection_keys()
        self._before = {key: graph.get_collection(key) for key in keys}
        self._added: dict[str, list[Any]] | None = None

    def added(self, key: str) -> list[Any]:
        """Lists what the tower added to collection ``key``, in order.

        Items that were in the collection before the tower do not count. After
        ``close`` the answer no longer changes, whatever later towers add; it
        also holds what a frozen collection has lost.
        """
        if self._added is not None:
            return list(self._added.get(key, []))
        before = {id(item) for item in self._before.get(key, [])}
        return [
            item for item in self._graph.get_collection(key) if id(item) not in before
        ]

    def close(self) -> None:
        """Keeps what was added and puts the frozen collections back."""
        keys = self._graph.get_all_collection_keys()
        self._added = {key: self.added(key) for key in keys}
        for key in self._frozen_keys:
            if key in self._before:
                self._graph.get_collection_ref(key)[:] = self._before[key]
            elif key in keys:
                self._graph.clear_collection(key)

"""A graph's collections, in which flat variables take the place of their parts."""

from typing import Any

import tensorflow as tf

from tw_core._records.origins import make_record


def is_local(variable: Any) -> bool:
    """Returns whether a variable is in its graph's local collection."""
    graph = getattr(variable, "graph", None)
    local = (
        graph.get_collection(tf.compat.v1.GraphKeys.LOCAL_VARIABLES)
        if graph is not None
        else []
    )
    return any(variable is other for other in local)


def swap_in_collections(graph: tf.Graph, old: Any, new: Any) -> None:
    """Puts ``new`` in the place of ``old`` in a graph's collections and its record."""
    for key in graph.get_all_collection_keys():
        items = graph.get_collection_ref(key)
        for i, item in enumerate(items):
            if item is old:
                items[i] = new
    make_record(graph).hand_over(old, new)

"""Which of the two ways to run is in force where this is asked.

A session graph is a ``tf.Graph`` that a session will run. A function graph is
being traced for a ``tf.function``, at any depth of nested functions, unless the
outermost graph is a session graph: then its body belongs to that graph.
"""

import tensorflow as tf


def builds_session_graph() -> bool:
    """Tells whether ops made now end in a graph that a session runs."""
    return not tf.executing_eagerly() and not traces_function()


def traces_function() -> bool:
    """Tells whether a ``tf.function`` called from eager code is being traced."""
    if tf.executing_eagerly():
        return False
    with tf.init_scope():
        return bool(tf.executing_eagerly())


def outermost_function_graph() -> tf.Graph:
    """Returns the graph of the trace in progress, whatever body is being built."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph

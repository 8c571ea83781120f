"""What is needed of TensorFlow beyond its public names."""

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

__all__ = [
    "SaveSpec",
    "SaveableObject",
    "in_xla_context",
    "outermost_function_graph",
    "set_initializer",
]


def in_xla_context(graph: tf.Graph) -> bool:
    """Returns whether ``graph``, or a graph around it, is being compiled by XLA."""
    return bool(GraphOrParentsInXlaContext(graph))


def set_initializer(variable: tf.Variable, initializer: tf.Operation) -> None:
    """Has ``variable.initializer``, which initialisers run, be another op."""
    variable._initializer_op = initializer


def outermost_function_graph() -> tf.Graph:
    """Returns the graph of the trace in progress, whatever body is being built."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph

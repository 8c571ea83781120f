"""What is needed of TensorFlow beyond its public names."""

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def in_xla_context(graph: tf.Graph) -> bool:
    """Tells whether ``graph``, or a graph around it, is being compiled by XLA."""
    return bool(GraphOrParentsInXlaContext(graph))


def set_initializer(variable: tf.Variable, initializer: tf.Operation) -> None:
    """Has ``variable.initializer``, which initialisers run, be another op."""
    variable._initializer_op = initializer

"""What is needed of TensorFlow beyond its public names."""

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def in_xla_context(graph: tf.Graph) -> bool:
    """Tells whether ``graph``, or a graph around it, is being compiled by XLA."""
    return bool(GraphOrParentsInXlaContext(graph))

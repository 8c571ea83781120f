"""What is asked of TensorFlow beyond its public names."""

import tensorflow as tf


def orders_effects() -> bool:
    """Tells whether effects built now happen in the order of the program.

    They do in the body of a ``tf.function``, and in branches and loops within. They
    do not in a session graph, nor in ``wrap_function``, where nothing happens that is
    not depended on. Where TensorFlow does not say, they are taken not to.
    """
    graph = tf.compat.v1.get_default_graph()
    return bool(getattr(graph, "_add_control_dependencies", False))

"""Which of TensorFlow's modes a call is made for."""

import tensorflow as tf

from tw_core import builds_session_graph
from tw_rlload._tf_compat import inside_branch_or_loop


def check_session_graph(*, caller: str) -> None:
    """Refuses to build anywhere but in a session graph.

    Raises:
      RuntimeError: eager mode, a ``tf.function``, or a branch or loop of a session
        graph, from where nothing could be fetched.
    """
    if not builds_session_graph():
        raise RuntimeError(
            f"{caller}: builds a session graph; make it inside `with "
            "tf.Graph().as_default():`. In TensorFlow 2 use tw_rlload.DeviceBatch and "
            "tw_rlload.EpochFunction."
        )
    if inside_branch_or_loop():
        raise RuntimeError(
            f"{caller}: builds what a session runs by itself; make it outside of "
            "tf.cond, tf.while_loop and tf.function, and choose in Python which step "
            "to run."
        )


def check_eager(what: str, *, caller: str) -> None:
    """Refuses graphs and the inside of a ``tf.function``.

    Args:
      what: what it does, that cannot be traced.
      caller: who asks; opens the message.

    Raises:
      RuntimeError: not in eager mode.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{caller}: {what}; do so outside of graphs and tf.function. In a session "
            "graph use tw_rlload.LocalSyncParallelOptimizer."
        )

"""Which mode is being built: the one answer for all packages.

A session graph is a ``tf.Graph`` that a session will run. A function graph is
being traced for a ``tf.function``, at any depth of nested functions, unless the
outermost graph is a session graph: then its body belongs to that graph. So
``tf.inside_function()``, which is True in a ``tf.cond`` branch of a session graph
as well, answers neither question.

Whether effects take place by themselves is a question of its own: inside a
``tf.function`` TensorFlow orders the assignments of a trace, while in a session
graph (its branches and loops included) and in ``wrap_function`` only what is fetched
or depended on runs.

AutoGraph rewrites every function that a ``tf.function`` calls, library code included:
needlessly, and at the cost of seconds in the first trace. ``without_autograph`` leaves
a function as it is written.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import tensorflow as tf

from tw_core._tf_compat import in_xla_context
from tw_core.checks import check_function

__all__ = [
    "builds_session_graph",
    "compiles_with_xla",
    "orders_effects",
    "traces_function",
    "without_autograph",
]

_F = TypeVar("_F", bound=Callable[..., object])


def builds_session_graph() -> bool:
    """Returns whether ops made now end in a graph that a session runs.

    Returns:
      True in a ``tf.Graph``, in the branches and loops of its ``tf.cond`` and
      ``tf.while_loop``, and in functions that it calls.
    """
    return not tf.executing_eagerly() and not traces_function()


def traces_function() -> bool:
    """Returns whether a function called from eager code is being traced.

    Returns:
      True in a ``tf.function`` or ``wrap_function``, and in the branches, loops and
      functions inside it.
    """
    if tf.executing_eagerly():
        return False
    with tf.init_scope():
        return bool(tf.executing_eagerly())


def orders_effects() -> bool:
    """Returns whether assignments made now take place by themselves, in program order.

    Returns:
      True in eager mode and in the body of a ``tf.function``, its branches and loops
      included, also where a session graph calls it. False in a session graph, in the
      branches and loops of one, and in ``wrap_function``: there an op runs only where
      it is fetched or depended on.
    """
    if tf.executing_eagerly():
        return True
    graph = tf.compat.v1.get_default_graph()
    # TensorFlow has no public name for it; where it does not say, effects are taken
    # to need a dependency, which is right in both cases.
    return bool(getattr(graph, "_add_control_dependencies", False))


def compiles_with_xla() -> bool:
    """Returns whether ops made now are part of a ``jit_compile=True`` function.

    True at any depth within it, in functions that it calls and in bodies of
    ``tf.cond`` and ``tf.while_loop``. What XLA compiles by itself
    (``tf.config.optimizer.set_jit``) does not count: ops that it cannot compile
    stay outside.
    """
    if tf.executing_eagerly():
        return False
    return in_xla_context(tf.compat.v1.get_default_graph())


def without_autograph(function: _F) -> _F:
    """Marks a function that AutoGraph shall not convert, nor what it calls.

    Args:
      function: library code. It must not call functions of the user's, which AutoGraph
        would then leave alone as well.

    Returns:
      A function that does the same.

    Raises:
      TypeError: ``function`` cannot be called.
    """
    check_function("without_autograph", function=function)
    return cast(_F, tf.autograph.experimental.do_not_convert(function))

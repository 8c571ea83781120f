"""The mode in which ops are being built: eager, a session graph or a function.

A session graph is a ``tf.Graph`` that a session will run. A function graph is
being traced for a ``tf.function``, at any depth of nested functions, unless the
outermost graph is a session graph: then the function's body belongs to that graph.
So ``tf.inside_function()``, which is also True in a ``tf.cond`` branch of a session
graph, cannot tell the two apart.

Whether effects run without being fetched is a separate question: inside a
``tf.function`` TensorFlow orders the assignments of a trace, while in a session
graph (its branches and loops included) and in ``wrap_function`` an op runs only if it
is fetched or depended on.

AutoGraph rewrites every function that a ``tf.function`` calls. For library code this is
unnecessary, and costs seconds in the first trace. ``without_autograph`` leaves a
function as it is written.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import tensorflow as tf

from tw_core._checks import check_function
from tw_core._tf_compat import in_body, in_xla_context

_F = TypeVar("_F", bound=Callable[..., object])


def builds_session_graph() -> bool:
    """Returns whether ops made now end up in a graph that a session runs.

    Returns:
      True in a ``tf.Graph``, in the branches and loops of its ``tf.cond`` and
      ``tf.while_loop``, and in functions that it calls.
    """
    return not tf.executing_eagerly() and not traces_function()


def check_session_graph(what: str, *, instead: str, in_bodies: bool = True) -> None:
    """Raises unless ops are being built in a graph that a session runs.

    Args:
      what: the subject of the message, such as a class.
      instead: a sentence that says what to do.
      in_bodies: whether branches, loops and functions of such a graph are allowed.

    Raises:
      RuntimeError: in eager mode, in a ``tf.function``, or in a body.
    """
    if builds_session_graph() and (in_bodies or not in_body()):
        return
    if tf.executing_eagerly():
        found = "eager mode"
    else:
        found = (
            "a tf.function"
            if traces_function()
            else "a branch, loop or function of one"
        )
    raise RuntimeError(f"{what} builds a session graph; got {found}. {instead}")


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
    """Returns whether assignments made now run automatically, in program order.

    Returns:
      True in eager mode and in the body of a ``tf.function``, its branches and loops
      included, even where a session graph calls it. False in a session graph, in the
      branches and loops of one, and in ``wrap_function``: there an op runs only if it
      is fetched or depended on.
    """
    if tf.executing_eagerly():
        return True
    graph = tf.compat.v1.get_default_graph()
    # TensorFlow has no public name for this. Without the attribute, effects are assumed
    # to need a dependency, which is correct in either case.
    return bool(getattr(graph, "_add_control_dependencies", False))


def compiles_with_xla() -> bool:
    """Returns whether ops made now are part of a ``jit_compile=True`` function.

    True at any depth within it, in functions that it calls and in bodies of
    ``tf.cond`` and ``tf.while_loop``. XLA's auto-clustering
    (``tf.config.optimizer.set_jit``) does not count: ops that it cannot compile
    stay outside the clusters.
    """
    if tf.executing_eagerly():
        return False
    return in_xla_context(tf.compat.v1.get_default_graph())


def without_autograph(function: _F) -> _F:
    """Exempts a function, and everything that it calls, from AutoGraph.

    Args:
      function: library code. It must not call user functions, which AutoGraph would
        then also leave unconverted.

    Returns:
      A function that does the same.

    Raises:
      TypeError: ``function`` cannot be called.
    """
    check_function(function=function)
    return cast(_F, tf.autograph.experimental.do_not_convert(function))

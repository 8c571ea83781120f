"""Makes new variables local, so that a saver leaves them out.

A replica's variables are copies: one of them belongs in a checkpoint. Whatever
makes the variable (``get_variable``, ``tf.Variable``, an optimizer's slots)
passes a variable creator; afterwards the variable is moved between collections,
because TensorFlow 2's ``tf.Variable`` ignores a ``collections`` argument.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tw_core._variable_kinds import refuse_reference_variables
from tw_core.checks import check_flag

_KEYS = tf.compat.v1.GraphKeys


@contextmanager
def override_to_local_variable(enable: bool = True) -> Iterator[None]:
    """Puts variables made inside into LOCAL_VARIABLES instead of GLOBAL_VARIABLES.

    Their other collections stay, so a trainable variable stays trainable. One
    made outside of GLOBAL_VARIABLES (with ``collections`` of its own) is left
    as it is. Variables of TensorFlow 2 outside of session graphs are in no
    collection, and nothing happens to them.

    Args:
      enable: False does nothing.

    Raises:
      ValueError: a reference variable is made inside.
      TypeError: ``enable`` is no bool.
    """
    check_flag("override_to_local_variable", enable=enable)
    if not enable:
        yield
        return
    with tf.variable_creator_scope(_make_local):
        yield


def _make_local(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    variable = next_creator(**kwargs)
    refuse_reference_variables([variable], caller="override_to_local_variable")
    graph = getattr(variable, "graph", None)
    if graph is None:
        return variable
    if _take_out(graph.get_collection_ref(_KEYS.GLOBAL_VARIABLES), variable):
        graph.add_to_collection(_KEYS.LOCAL_VARIABLES, variable)
    return variable


def _take_out(collection: list[Any], variable: tf.Variable) -> bool:
    # From the end, where a new variable is; `remove` would compare elementwise.
    for i in reversed(range(len(collection))):
        if collection[i] is variable:
            del collection[i]
            return True
    return False

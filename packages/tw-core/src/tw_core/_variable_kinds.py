"""Kinds of variables: resource variables, and what is accepted or refused beside.

TensorFlow's resource variable is the only kind that works everywhere here. A
Keras 3 variable holds one. A reference variable, the kind before resources,
comes back with ``disable_v2_behavior()``; device setters, local variables and
copies would treat it wrongly without a word, so it is refused by name.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

REFERENCE_ADVICE = (
    "only resource variables work: call tf.compat.v1.enable_resource_variables() "
    "before making it"
)


def is_variable(value: object) -> bool:
    """Tells whether ``value`` is a TensorFlow variable or holds one, as Keras's do."""
    held = getattr(value, "value", None)
    return isinstance(value, tf.Variable) or isinstance(held, tf.Variable)


def tf_variable(variable: Any) -> tf.Variable:
    """Returns the TensorFlow variable that ``variable`` is or holds."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def is_reference_variable(variable: Any) -> bool:
    """Tells whether a variable is of the kind that came before resources."""
    return str(getattr(variable.dtype, "name", variable.dtype)).endswith("_ref")


def reference_variables_named(variables: Iterable[Any]) -> list[str]:
    """Names the reference variables among ``variables``, with what to do instead."""
    names = dict.fromkeys(v.name for v in variables if is_reference_variable(v))
    return [f"{name} is a reference variable; {REFERENCE_ADVICE}" for name in names]


def refuse_reference_variables(variables: Iterable[Any], *, caller: str) -> None:
    """Refuses reference variables.

    Args:
      variables: variables of any kind.
      caller: who asks; opens the message.

    Raises:
      ValueError: some are reference variables; every one is named.
    """
    found = reference_variables_named(variables)
    if found:
        raise ValueError(f"{caller}: {'; '.join(found)}.")

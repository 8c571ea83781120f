"""Kinds of variables, and the ops that make or use them.

TensorFlow's resource variable is the only kind that works everywhere here. A
Keras 3 variable holds one. Reference variables, the older kind, return with
``disable_v2_behavior()``; device setters, local variables and copies would
silently mishandle them, so they are refused by name.

An op that uses a variable runs on the variable's device, no matter which device
it requests. Device functions assign it that device: ``tf.gradients`` with
``colocate_gradients_with_ops`` ties the gradient of a gather to the gather by
name, and a session without soft placement refuses two devices for one group.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

REFERENCE_ADVICE = (
    "only resource variables are supported: call "
    "tf.compat.v1.enable_resource_variables() before making it"
)

# These pass a variable's handle to a function's body, and run anywhere.
CALLS = frozenset(
    {
        "Case",
        "If",
        "PartitionedCall",
        "StatefulPartitionedCall",
        "StatelessCase",
        "StatelessIf",
        "StatelessWhile",
        "While",
    }
)

# Operations on a variable's handle.
READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})
WRITES = frozenset(
    {
        "AssignVariableOp",
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "ResourceScatterUpdate",
        "ResourceScatterAdd",
    }
)

# Collection of the names of ops whose handles are not variables of their own. The key
# is not a string, so that TensorFlow leaves the collection out of exported graphs.
HIDDEN_HANDLES = ("tw_core/hidden_handles",)


def is_variable(value: object) -> bool:
    """Returns whether ``value`` is a TensorFlow variable or a Keras variable."""
    held = getattr(value, "value", None)
    return isinstance(value, tf.Variable) or isinstance(held, tf.Variable)


def tf_variable(variable: Any) -> tf.Variable:
    """Returns ``variable`` itself, or the TensorFlow variable that a Keras one holds.

    Raises:
      TypeError: ``variable`` is neither.
    """
    if isinstance(variable, tf.Variable):
        return variable
    held = getattr(variable, "value", None)
    if not isinstance(held, tf.Variable):
        raise TypeError(
            f"variable must be a TensorFlow or Keras variable; got {variable!r}."
        )
    return held


def tf_variables(variables: Iterable[Any]) -> list[tf.Variable]:
    """As ``tf_variable``, for each of several variables.

    Args:
      variables: [N] TensorFlow and Keras variables.

    Returns:
      [N] variables.

    Raises:
      TypeError: something that is not a variable.
    """
    return [tf_variable(variable) for variable in variables]


def plain_name(named: Any) -> str:
    """Returns the name of a variable or a tensor, without the ``:0`` of its output."""
    return str(named.name).split(":")[0]


def is_reference_variable(variable: Any) -> bool:
    """Returns whether a variable is a reference variable, the kind before resources."""
    return str(getattr(variable.dtype, "name", variable.dtype)).endswith("_ref")


def reference_variables_named(variables: Iterable[Any]) -> list[str]:
    """Names the reference variables among ``variables``, with what to do instead."""
    names = dict.fromkeys(v.name for v in variables if is_reference_variable(v))
    return [f"{name} is a reference variable; {REFERENCE_ADVICE}" for name in names]


def refuse_reference_variables(variables: Iterable[Any]) -> None:
    """Refuses reference variables, naming every one."""
    found = reference_variables_named(variables)
    if found:
        raise ValueError(f"{'; '.join(found)}.")


def make_local(variable: tf.Variable) -> None:
    """Moves a new variable, if it is in the global collection, to the local one.

    Refuses reference variables. Variables outside of session graphs stay as they are.
    """
    refuse_reference_variables([variable])
    graph = getattr(variable, "graph", None)
    if graph is None:
        return
    keys = tf.compat.v1.GraphKeys
    collection = graph.get_collection_ref(keys.GLOBAL_VARIABLES)
    # From the end, where new variables are; `remove` would compare elementwise.
    for i in reversed(range(len(collection))):
        if collection[i] is variable:
            del collection[i]
            graph.add_to_collection(keys.LOCAL_VARIABLES, variable)
            return


def hands_on(op: tf.Operation) -> bool:
    """Returns whether ``op`` passes variables to a body, rather than using them."""
    return op.type in CALLS


def device_of_variable(op: tf.Operation) -> str:
    """Returns the device of the variable that ``op`` works on, or ``""``."""
    if hands_on(op):
        return ""
    handles = [tensor.op for tensor in op.inputs if tensor.op.type == "VarHandleOp"]
    return str(handles[0].device) if handles else ""


def check_operation(op: object) -> None:
    """Refuses anything but an operation; for device functions."""
    if not isinstance(op, tf.Operation):
        raise TypeError(f"op must be a tf.Operation; got {op!r}.")


def refuse_reference_op(op: tf.Operation) -> None:
    """Refuses an op that makes a reference variable; for device functions."""
    if op.type in ("Variable", "VariableV2"):
        raise ValueError(f"{op.name} is a reference variable; {REFERENCE_ADVICE}.")

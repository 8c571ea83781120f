"""Ops that make or use a variable, and where they run.

An op that works on a variable runs on the variable's device, whatever device it
is given. Device functions give it that device: ``tf.gradients`` with
``colocate_gradients_with_ops`` ties the gradient of a gather to the gather by
name, and a session without soft placement refuses two devices for one group.
"""

import tensorflow as tf

from tw_core._variable_kinds import REFERENCE_ADVICE

# These hand a variable's handle to a function's body, and run anywhere.
_CALLS = frozenset(
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


def hands_on(op: tf.Operation) -> bool:
    """Tells whether ``op`` passes variables to a body, rather than using them."""
    return op.type in _CALLS


def device_of_variable(op: tf.Operation) -> str:
    """Returns the device of the variable that ``op`` works on, or ``""``."""
    if hands_on(op):
        return ""
    handles = [tensor.op for tensor in op.inputs if tensor.op.type == "VarHandleOp"]
    return str(handles[0].device) if handles else ""


def check_operation(caller: str, op: object) -> None:
    """Refuses what is no operation; for device functions."""
    if not isinstance(op, tf.Operation):
        raise TypeError(f"{caller}: op must be a tf.Operation; got {op!r}.")


def refuse_reference_op(op: tf.Operation, *, caller: str) -> None:
    """Refuses an op that makes a reference variable; for device functions.

    Raises:
      ValueError: ``op`` is one.
    """
    if op.type in ("Variable", "VariableV2"):
        raise ValueError(
            f"{caller}: {op.name} is a reference variable; {REFERENCE_ADVICE}."
        )

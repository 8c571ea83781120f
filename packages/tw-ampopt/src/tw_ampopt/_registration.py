"""The gradients registered with an optimizer in a session graph, by device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tw_ampopt._buffers import Buffer
from tw_ampopt._inner import as_tf_variable
from tw_core import canonical_device, check_grad_list


@dataclass
class DeviceGradients:
    """What one device has registered.

    Attributes:
      device: the device string as the losses have it.
      variables: in the order of first registration.
      calls: by the identity of a variable, a gradient (or None) a call.
    """

    device: str
    variables: list[Any] = field(default_factory=list)
    calls: dict[int, list[Buffer | None]] = field(default_factory=dict)

    def add(self, variables: Sequence[Any], grads: Sequence[Buffer | None]) -> None:
        """Adds the gradients of one call."""
        for variable, grad in zip(variables, grads, strict=True):
            if id(variable) not in self.calls:
                self.variables.append(variable)
                self.calls[id(variable)] = []
            self.calls[id(variable)].append(grad)

    def in_order(self) -> list[list[Buffer | None]]:
        """Returns [N][calls] gradients."""
        return [self.calls[id(variable)] for variable in self.variables]


def check_call(loss: Any, trainable_vars: Any, *, caller: str) -> list[Any]:
    """Checks one registration.

    Returns:
      The variables as a list.

    Raises:
      TypeError: no tensor, or no list or dict of variables.
      ValueError: no variable, one that comes twice, or one on another device than
        the loss.
    """
    if not tf.is_tensor(loss):
        raise TypeError(f"{caller}: loss must be a tensor; got {loss!r}.")
    if isinstance(trainable_vars, dict):
        trainable_vars = list(trainable_vars.values())
    if not isinstance(trainable_vars, list | tuple):
        raise TypeError(
            f"{caller}: trainable_vars must be a list or dict of variables; got "
            f"{trainable_vars!r}."
        )
    variables = list(trainable_vars)
    if not variables:
        raise ValueError(
            f"{caller}: trainable_vars is empty; pass the variables that the loss "
            f"{loss.name!r} trains."
        )
    _check_are_variables(variables, caller)
    _check_once(variables, caller)
    _check_device(loss, variables, caller)
    return variables


def check_towers(towers: Sequence[DeviceGradients], *, caller: str) -> None:
    """Checks that every device brings the same variables, and any gradient at all.

    Raises:
      ValueError: variables that differ between devices, or no gradient anywhere.
    """
    lists = [
        [(None, as_tf_variable(variable)) for variable in tower.variables]
        for tower in towers
    ]
    devices = ", ".join(f"tower {k} is {t.device!r}" for k, t in enumerate(towers))
    check_grad_list(lists, caller=f"{caller} ({devices})", allow_none=True)
    grads = [grad for tower in towers for calls in tower.in_order() for grad in calls]
    if all(grad is None for grad in grads):
        names = sorted({v.name for tower in towers for v in tower.variables})
        raise ValueError(
            f"{caller}: no registered loss depends on any of its variables {names}; "
            "check what the losses are computed from, or pass allow_no_op=True."
        )


def _check_are_variables(variables: Sequence[Any], caller: str) -> None:
    wrong = [v for v in variables if not _is_resource_variable(as_variable(v))]
    if wrong:
        raise TypeError(
            f"{caller}: trainable_vars must hold resource variables; got {wrong}. "
            "Reference variables become resource variables by "
            "tf.compat.v1.enable_resource_variables()."
        )


def _is_resource_variable(variable: Any) -> bool:
    # The dtype of a reference variable is a reference to its base.
    return isinstance(variable, tf.Variable) and (
        variable.dtype == variable.dtype.base_dtype
    )


def as_variable(variable: Any) -> Any:
    """Returns the ``tf.Variable`` in a Keras variable; anything else as it is."""
    if isinstance(variable, tf.Variable):
        return variable
    return getattr(variable, "value", variable)


def _check_once(variables: Sequence[Any], caller: str) -> None:
    counts = Counter(id(variable) for variable in variables)
    twice = sorted({v.name for v in variables if counts[id(v)] > 1})
    if twice:
        raise ValueError(
            f"{caller}: trainable_vars holds {twice} more than once; each variable has "
            "one gradient a call. To add up losses, register them one by one."
        )


def _check_device(loss: Any, variables: Sequence[Any], caller: str) -> None:
    device = canonical_device(loss.device)
    elsewhere = [
        f"{variable.name} on {as_variable(variable).device!r}"
        for variable in variables
        if canonical_device(as_variable(variable).device) != device
    ]
    if elsewhere:
        raise ValueError(
            f"{caller}: variables must be on their loss's device; the loss "
            f"{loss.name!r} is on {loss.device!r}, but {', '.join(elsewhere)}. Compute "
            "the loss where its variables are: with tf.device(variable.device)."
        )

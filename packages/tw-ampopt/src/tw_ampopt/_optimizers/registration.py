"""The gradients registered with an optimizer in a session graph, by device."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tw_ampopt._checks.arguments import check_loss, check_variables
from tw_ampopt._update.buffers import Buffer
from tw_ampopt._variables import name_of
from tw_core.checks import naming
from tw_core.devices import canonical_device
from tw_core.gradients import check_grad_list
from tw_core.variables import repeated_variables, tf_variable


@dataclass
class DeviceGradients:
    """The gradients that one device has registered.

    Attributes:
      key: the device's canonical name.
      device: the device string as the losses have it.
      variables: in the order of first registration.
      calls: by the identity of a variable, one gradient (or None) per call.
    """

    key: str
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

    def has_gradient(self) -> bool:
        """Tests whether any loss reaches any variable."""
        return any(grad is not None for calls in self.in_order() for grad in calls)


class Registered:
    """All devices' gradients, until an op takes them."""

    def __init__(self, caller: str) -> None:
        """Starts empty; ``caller`` opens messages."""
        self._by_device: dict[str, DeviceGradients] = {}
        self._caller = caller
        self._taken = False

    def check(self, loss: Any, trainable_vars: Any) -> list[Any]:
        """Checks one registration and returns its variables as a list."""
        caller = f"{self._caller}.register_gradients"
        if self._taken:
            raise RuntimeError(
                f"{caller}: comes after apply_updates, whose op would not see these "
                "gradients; register all of them first."
            )
        check_loss(loss, caller=caller)
        if isinstance(trainable_vars, dict):
            trainable_vars = list(trainable_vars.values())
        if not isinstance(trainable_vars, list | tuple):
            raise TypeError(
                f"{caller}: trainable_vars must be a list or dict of variables; got "
                f"{trainable_vars!r}."
            )
        if not trainable_vars:
            raise ValueError(
                f"{caller}: trainable_vars is empty; pass the variables that the loss "
                f"{loss.name!r} trains."
            )
        variables = check_variables(trainable_vars, caller=caller)
        _check_once(variables, caller)
        _check_device(loss, variables, caller)
        return variables

    def add(
        self, device: str, variables: Sequence[Any], grads: Sequence[Buffer | None]
    ) -> None:
        """Adds the gradients of one call."""
        key = canonical_device(device)
        own = self._by_device.setdefault(key, DeviceGradients(key, device))
        own.add(variables, grads)

    def take(self, *, allow_none: bool) -> list[DeviceGradients]:
        """Returns each device's gradients, once.

        Args:
          allow_none: whether no gradient at all is allowed; it gives ``[]``.
        """
        caller = f"{self._caller}.apply_updates"
        if self._taken:
            raise RuntimeError(
                f"{caller}: was called before; keep the op that it returned."
            )
        towers = list(self._by_device.values())
        if allow_none and not any(tower.has_gradient() for tower in towers):
            self._taken = True
            return []
        if not towers:
            raise ValueError(
                f"{caller}: no gradients were registered; call register_gradients, or "
                "pass allow_no_op=True."
            )
        _check_towers(towers, caller)
        self._taken = True
        return towers


def _check_towers(towers: Sequence[DeviceGradients], caller: str) -> None:
    lists = [[(None, tf_variable(v)) for v in tower.variables] for tower in towers]
    devices = ", ".join(f"tower {k} is {t.device!r}" for k, t in enumerate(towers))
    with naming(f"{caller} ({devices})"):
        check_grad_list(lists, allow_none=True)
    if not any(tower.has_gradient() for tower in towers):
        names = sorted({name_of(v) for tower in towers for v in tower.variables})
        raise ValueError(
            f"{caller}: no registered loss depends on any of its variables {names}; "
            "check what the losses are computed from, or pass allow_no_op=True."
        )


def _check_once(variables: Sequence[Any], caller: str) -> None:
    twice = sorted(map(name_of, repeated_variables(variables)))
    if twice:
        raise ValueError(
            f"{caller}: trainable_vars holds {twice} more than once; each variable has "
            "one gradient per call. To add up losses, register them one by one."
        )


def _check_device(loss: Any, variables: Sequence[Any], caller: str) -> None:
    device = canonical_device(loss.device)
    elsewhere = [
        f"{name_of(variable)} on {tf_variable(variable).device!r}"
        for variable in variables
        if canonical_device(tf_variable(variable).device) != device
    ]
    if elsewhere:
        raise ValueError(
            f"{caller}: variables must be on their loss's device; the loss "
            f"{loss.name!r} is on {loss.device!r}, but {', '.join(elsewhere)}. Compute "
            "the loss where its variables are: with tf.device(variable.device)."
        )

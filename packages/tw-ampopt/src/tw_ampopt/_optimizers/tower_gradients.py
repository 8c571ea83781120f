"""Variables and gradients as callers pass them, made into [K][N] lists.

In a session graph they are registered loss by loss, and a loss's device identifies its
tower. A ``TowerOptimizer`` takes lists of them, or pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import (
    check_loss,
    check_same_graph,
    check_variables,
    name_of,
)
from tw_ampopt._checks.gradients import check_gradients, check_pairs, list_pairs
from tw_ampopt._update.buffers import Buffer, RawGradients
from tw_ampopt._update.weights import as_tensors, mean_of_calls
from tw_ampopt._variables import common_device, host_of, identity
from tw_core import Tower, check_towers, towers
from tw_core.checks import caller
from tw_core.devices import canonical_device
from tw_core.gradients import check_any_gradient, check_grad_list, check_weight
from tw_core.variables import repeated_variables, tf_variable, tf_variables


@dataclass
class DeviceGradients:
    """The gradients that one device has registered."""

    key: str  # canonical name of the device
    device: str  # as the losses have it
    variables: list[Any] = field(default_factory=list)  # in order of registration
    # By a variable's id, one per call.
    calls: dict[int, list[Buffer | None]] = field(default_factory=dict)
    weights: list[Any] = field(default_factory=list)  # one per call, or none at all
    weights_of: dict[int, list[Any]] = field(default_factory=dict)  # like calls

    def add(
        self, variables: Sequence[Any], grads: Sequence[Buffer | None], weight: Any
    ) -> None:
        """Adds the gradients of one call, and its weight, unless that is None."""
        if weight is not None:
            self.weights.append(weight)
        for variable, grad in zip(variables, grads, strict=True):
            if id(variable) not in self.calls:
                self.variables.append(variable)
                self.calls[id(variable)] = []
                self.weights_of[id(variable)] = []
            self.calls[id(variable)].append(grad)
            self.weights_of[id(variable)].append(weight)

    def in_order(self) -> list[list[Buffer | None]]:
        """Returns [N][calls] gradients."""
        return [self.calls[id(variable)] for variable in self.variables]

    def in_order_weighed(self) -> list[list[Buffer | None]]:
        """Returns [N][1] gradients, weighted means over the calls."""
        keys = [id(variable) for variable in self.variables]
        with tf.device(self.device or None):
            return [[mean_of_calls(self.calls[k], self.weights_of[k])] for k in keys]

    def weight(self) -> Any:
        """Returns the total weight of all calls."""
        if len(self.weights) == 1:
            return self.weights[0]
        with tf.device(host_of(self.device) or None):
            return tf.add_n(as_tensors(self.weights))

    def has_gradient(self) -> bool:
        """Tests whether any loss reaches any variable."""
        return any(grad is not None for calls in self.in_order() for grad in calls)


class Registered:
    """All devices' gradients, until an op takes them."""

    def __init__(self) -> None:
        """Starts empty."""
        self._by_device: dict[str, DeviceGradients] = {}
        self._taken = False

    def check(self, loss: Any, trainable_vars: Any, weight: Any) -> list[Any]:
        """Checks one registration and returns its variables as a list."""
        if self._taken:
            raise RuntimeError(
                f"{caller()}: comes after apply_updates, whose op would not see these "
                "gradients; register all of them first."
            )
        check_loss(loss)
        self._check_weight(weight)
        if isinstance(trainable_vars, dict):
            trainable_vars = list(trainable_vars.values())
        if not isinstance(trainable_vars, list | tuple):
            raise TypeError(
                f"{caller()}: trainable_vars must be a list or dict of variables; got "
                f"{trainable_vars!r}."
            )
        if not trainable_vars:
            raise ValueError(
                f"{caller()}: trainable_vars is empty; pass the variables that the "
                f"loss {loss.name!r} trains."
            )
        variables = check_variables(trainable_vars)
        _check_once(variables)
        _check_device(loss, variables)
        return variables

    def add(
        self,
        device: str,
        variables: Sequence[Any],
        grads: Sequence[Buffer | None],
        weight: Any,
    ) -> None:
        """Adds the gradients of one call, and its weight, unless that is None."""
        key = canonical_device(device)
        own = self._by_device.setdefault(key, DeviceGradients(key, device))
        own.add(variables, grads, weight)

    @property
    def weigh(self) -> bool:
        """Whether the calls have weights; either all do, or none."""
        return any(tower.weights for tower in self._by_device.values())

    def take(self, *, allow_none: bool) -> list[DeviceGradients]:
        """Returns each device's gradients, once; ``[]`` for none, if allowed."""
        if self._taken:
            raise RuntimeError(
                f"{caller()}: was called before; keep the op that it returned."
            )
        towers = list(self._by_device.values())
        if allow_none and not any(tower.has_gradient() for tower in towers):
            self._taken = True
            return []
        if not towers:
            raise ValueError(
                f"{caller()}: no gradients were registered; call register_gradients, "
                "or pass allow_no_op=True."
            )
        _check_registered(towers)
        self._taken = True
        return towers

    def _check_weight(self, weight: Any) -> None:
        if weight is not None:
            check_weight(weight)
            check_weights_usable([weight])
        if self._by_device and self.weigh != (weight is not None):
            came, before = ("one", "none") if weight is not None else ("none", "some")
            raise ValueError(
                f"{caller()}: every registration brings a weight, or none does; got "
                f"{came} after {before}."
            )


def check_weights_usable(weights: Sequence[Any]) -> None:
    """Refuses weights that ops made now cannot use."""
    tensors = [weight for weight in weights if tf.is_tensor(weight)]
    check_same_graph(tensors, lambda _: "a weight")


def variables_by_tower(variables: Any) -> list[list[Any]]:
    """Returns checked [K][N] variables; [1][N] if all towers share theirs."""
    wanted = f"{caller()}: variables must be one list per tower, or one list for all"
    lists = _lists_by_tower(variables, wanted)
    for tower in lists:
        check_variables(tower)
    if not any(lists):
        raise ValueError(
            f"{caller()}: no variables; build the model before the optimizer, and pass "
            "e.g. [model.trainable_variables for model in models]."
        )
    keys = [list(map(identity, tower)) for tower in lists]
    if all(key == keys[0] for key in keys):
        lists = lists[:1]
    pairs = [[(None, v) for v in tf_variables(tower)] for tower in lists]
    check_grad_list(pairs, allow_none=True)
    twice = repeated_variables([v for tower in lists for v in tower])
    if twice:
        raise ValueError(
            f"{caller()}: {sorted(v.name for v in twice)} came more than once; every "
            "tower has its own variables, or all have the same list."
        )
    return lists


def towers_of(
    lists: Sequence[Sequence[Any]], given: Sequence[Tower] | None
) -> tuple[Tower, ...]:
    """Returns the given towers, or one for each list of variables, on its device."""
    if given is None:
        return tuple(towers([common_device(tower) for tower in lists]))
    check_towers(given)
    if len(lists) not in (1, len(given)):
        raise ValueError(
            f"{caller()}: variables must be one list per tower, or one list for all; "
            f"got {len(lists)} lists for {len(given)} towers."
        )
    return tuple(given)


def gradients_by_tower(
    grads: Any, variables: Sequence[Sequence[Any]], total: int
) -> RawGradients:
    """Checks [K][N] gradients, or [N] for one tower; returns [K][N][1]."""
    wanted = f"{caller()}: grads must be [K][N] gradients, one list per tower"
    by_tower = _lists_by_tower(grads, wanted)
    lists = list(variables) * (total if len(variables) == 1 else 1)
    counts, expected = [len(t) for t in by_tower], [len(v) for v in lists]
    if counts != expected:
        raise ValueError(
            f"{caller()}: grads must hold one gradient (or None) per variable from "
            f"each of {total} towers, {expected} of them; got {counts}."
        )
    check_any_gradient([g for tower in by_tower for g in tower], lists[0])
    return _checked(by_tower, lists)


def gradients_of_pairs(
    grads_and_vars: Any, variables: Sequence[Sequence[Any]], total: int
) -> RawGradients:
    """Checks [N] or [K][N] pairs; returns [K][N][1] in the order of ``variables``."""
    pairs = list_pairs(grads_and_vars)
    nested = bool(pairs) and all(isinstance(tower, list) for tower in pairs)
    by_tower = pairs if nested else [pairs]
    if len(by_tower) != total:
        raise ValueError(
            f"{caller()}: grads_and_vars must hold pairs from each of {total} towers; "
            f"got them from {len(by_tower)}."
        )
    lists = list(variables) * (total if len(variables) == 1 else 1)
    grads = []
    for tower, own in zip(by_tower, lists, strict=True):
        checked = check_pairs(tower)
        _check_same([v for _, v in checked], own)
        found = {identity(variable): grad for grad, variable in checked}
        grads.append([found[identity(variable)] for variable in own])
    return _checked(grads, lists)


def _check_registered(found: Sequence[DeviceGradients]) -> None:
    lists = [[(None, v) for v in tf_variables(tower.variables)] for tower in found]
    devices = ", ".join(f"tower {k} is {t.device!r}" for k, t in enumerate(found))
    try:
        check_grad_list(lists, allow_none=True)
    except ValueError as error:  # A registration has a device, and no number.
        raise ValueError(f"{error}\nHere {devices}.") from None
    if not any(tower.has_gradient() for tower in found):
        names = sorted({name_of(v) for tower in found for v in tower.variables})
        raise ValueError(
            f"{caller()}: no registered loss depends on any of its variables {names}; "
            "check what the losses are computed from, or pass allow_no_op=True."
        )


def _check_once(variables: Sequence[Any]) -> None:
    twice = sorted(map(name_of, repeated_variables(variables)))
    if twice:
        raise ValueError(
            f"{caller()}: trainable_vars holds {twice} more than once; each variable "
            "has one gradient per call. To add up losses, register them one by one."
        )


def _check_device(loss: Any, variables: Sequence[Any]) -> None:
    device = canonical_device(loss.device)
    elsewhere = [
        f"{name_of(variable)} on {tf_variable(variable).device!r}"
        for variable in variables
        if canonical_device(tf_variable(variable).device) != device
    ]
    if elsewhere:
        raise ValueError(
            f"{caller()}: variables must be on their loss's device; the loss "
            f"{loss.name!r} is on {loss.device!r}, but {', '.join(elsewhere)}. Compute "
            "the loss where its variables are: with tf.device(variable.device)."
        )


def _lists_by_tower(values: Any, wanted: str) -> list[list[Any]]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{wanted}; got {values!r}.")
    are_lists = [isinstance(tower, list | tuple) for tower in values]
    if not any(are_lists):
        return [list(values)]
    if not all(are_lists):
        raise TypeError(f"{wanted}; got lists and others: {values!r}.")
    return [list(tower) for tower in values]


def _checked(
    grads: Sequence[Sequence[Any]], lists: Sequence[Sequence[Any]]
) -> RawGradients:
    checked = check_gradients(grads, lists)
    return [[[grad] for grad in tower] for tower in checked]


def _check_same(came: Sequence[Any], own: Sequence[Any]) -> None:
    given, known = set(map(identity, came)), set(map(identity, own))
    unknown = [name_of(v) for v in came if identity(v) not in known]
    missing = [name_of(v) for v in own if identity(v) not in given]
    if unknown or missing:
        raise ValueError(
            f"{caller()}: the pairs must have the variables that the optimizer was "
            f"made for; got unknown {unknown}, and missing are {missing}. A variable "
            "without a gradient takes part with None."
        )

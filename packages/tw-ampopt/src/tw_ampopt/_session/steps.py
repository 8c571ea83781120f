"""The registered losses and built steps of one optimizer in a session graph.

Losses are registered one by one; the device of a loss identifies its tower. State is
made when the first step for a set of variables is built.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import (
    check_alike,
    check_loss,
    check_same_graph,
    check_variables,
    name_of,
)
from tw_ampopt._checks.gradients import check_still_usable
from tw_ampopt._settings import Settings
from tw_ampopt._update.buffers import Buffer, RawGradients, nonfinite_flags, to_wide
from tw_ampopt._update.state import SharedState
from tw_ampopt._update.update import Updater
from tw_ampopt._update.weights import as_tensors, mean_of_calls
from tw_ampopt._variables import are_local, host_of
from tw_core.devices import canonical_device
from tw_core.internal import (
    check_session_graph,
    check_weight,
    repeated_variables,
    tf_variable,
    tf_variables,
)

_GATE_OP = 1  # v1's option for gradients that wait for each other


@dataclass
class DeviceGradients:
    """The gradients that one device has registered."""

    key: str  # canonical name of the device
    device: str  # as the losses have it
    variables: list[Any] = field(default_factory=list)  # in order of registration
    # By a variable's id: the gradient and the weight of each call.
    calls: dict[int, list[tuple[Buffer | None, Any]]] = field(default_factory=dict)
    weights: list[Any] = field(default_factory=list)  # one per call, or none at all

    def gradients(self) -> list[list[Buffer | None]]:
        """Returns [N][calls] gradients."""
        return [[grad for grad, _ in self.calls[id(v)]] for v in self.variables]

    def weighted_means(self) -> list[list[Buffer | None]]:
        """Returns [N][1] gradients, weighted means over the calls."""
        with tf.device(self.device or None):
            return [[mean_of_calls(self.calls[id(v)])] for v in self.variables]

    def weight(self) -> Any:
        """Returns the total weight of all calls."""
        if len(self.weights) == 1:
            return self.weights[0]
        with tf.device(host_of(self.device) or None):
            return tf.add_n(as_tensors(self.weights))


class Registered:
    """All devices' gradients, until an op takes them."""

    def __init__(self) -> None:
        self._by_device: dict[str, DeviceGradients] = {}
        self._taken = False

    def check(self, loss: Any, trainable_vars: Any, weight: Any) -> list[Any]:
        """Checks one registration and returns its variables as a list."""
        if self._taken:
            raise RuntimeError(
                "register_gradients was called after apply_updates, whose op does not "
                "use these gradients; register all gradients first."
            )
        check_loss(loss)
        self._check_weight(weight)
        if isinstance(trainable_vars, dict):
            trainable_vars = list(trainable_vars.values())
        if not isinstance(trainable_vars, list | tuple):
            raise TypeError(
                "trainable_vars must be a list or dict of variables; got "
                f"{trainable_vars!r}."
            )
        if not trainable_vars:
            raise ValueError(
                "trainable_vars is empty; pass the variables that the loss "
                f"{loss.name!r} trains."
            )
        variables = check_variables(trainable_vars)
        twice = sorted(map(name_of, repeated_variables(variables)))
        if twice:
            raise ValueError(
                f"trainable_vars holds {twice} more than once; each variable has one "
                "gradient per call. To add up losses, register them one by one."
            )
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
        if weight is not None:
            own.weights.append(weight)
        for variable, grad in zip(variables, grads, strict=True):
            if id(variable) not in own.calls:
                own.variables.append(variable)
            own.calls.setdefault(id(variable), []).append((grad, weight))

    def take(self, *, allow_none: bool) -> list[DeviceGradients]:
        """Returns each device's gradients, once; ``[]`` for none, if allowed."""
        if self._taken:
            raise RuntimeError(
                "apply_updates has already been called; keep the op that it returned."
            )
        towers = list(self._by_device.values())
        calls = [call for tower in towers for call in tower.calls.values()]
        reaches = any(grad is not None for call in calls for grad, _ in call)
        if not reaches and not allow_none:
            if not towers:
                raise ValueError(
                    "No gradients were registered; call register_gradients, or pass "
                    "allow_no_op=True."
                )
            names = sorted({name_of(v) for tower in towers for v in tower.variables})
            raise ValueError(
                f"No registered loss depends on any of its variables {names}; check "
                "what the losses are computed from, or pass allow_no_op=True."
            )
        if reaches:
            named = [f"tower {k} is {t.device!r}" for k, t in enumerate(towers)]
            try:
                check_alike([tower.variables for tower in towers])
            except ValueError as error:  # A registration has a device, and no number.
                raise ValueError(f"{error}\nHere {', '.join(named)}.") from None
        self._taken = True
        return towers if reaches else []

    def _check_weight(self, weight: Any) -> None:
        if weight is not None:
            check_weight(weight)
            _check_weights_usable([weight])
        weighs = any(tower.weights for tower in self._by_device.values())
        if self._by_device and weighs != (weight is not None):
            came, before = ("one", "none") if weight is not None else ("none", "some")
            raise ValueError(
                f"Either all registrations must have a weight, or none; got {came} "
                f"after {before}."
            )


class GraphSteps:
    """Updaters, keyed by their variables, and the last step built."""

    def __init__(self, scope: str, settings: Settings, shared: SharedState) -> None:
        self.updater: Updater | None = None  # of the last step
        self.reset_op: tf.Operation | None = None
        self._scope = scope
        self._settings = settings
        self._shared = shared
        self._updaters: dict[tuple[int | bool, ...], Updater] = {}
        self._grads: RawGradients = []
        self._flags: tf.Tensor | None = None
        shared.on_new_slots.append(self._renew_reset_op)
        with tf.init_scope():  # not a branch that may be under construction
            self._graph = tf.compat.v1.get_default_graph()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Enters the optimizer's graph and name scope."""
        with ExitStack() as stack:
            if tf.executing_eagerly():  # the graph has been left since
                stack.enter_context(self._graph.as_default())
            stack.enter_context(tf.name_scope(f"{self._scope}/"))
            yield

    def start(self, device: str, *, local: bool = False) -> SharedState:
        """Returns the shared state; makes missing scalars near ``device``."""
        with self.scope():
            self._shared.start(device, local=local)
        return self._shared

    def scaled_gradients(
        self, loss: tf.Tensor, variables: Sequence[Any], **options: Any
    ) -> list[Any]:
        """Returns [N] gradients (or None) of the scaled loss, on the loss's device."""
        check_in_graph()
        plain = tf_variables(variables)
        shared = self.start(plain[0].device, local=are_local(plain))
        gate = options.pop("gate_gradients", 0) == _GATE_OP
        scope = tf.name_scope(f"{self._settings.prefix}_grad")
        with scope, tf.device(loss.device or None):
            scaled = shared.scaled(to_wide(loss))
            return list(
                tf.compat.v1.gradients(scaled, plain, gate_gradients=gate, **options)
            )

    def build_registered(self, towers: Sequence[DeviceGradients]) -> tf.Tensor:
        """Builds the step of registered gradients; returns whether any changed."""
        variables = [tower.variables for tower in towers]
        grads, weights = [tower.gradients() for tower in towers], None
        check_still_usable(grads, variables)
        if towers[0].weights:  # then all have some
            _check_weights_usable([w for tower in towers for w in tower.weights])
            with self.scope():
                grads = [tower.weighted_means() for tower in towers]
                weights = [tower.weight() for tower in towers]
        places = [(tower.key, tower.device) for tower in towers]
        return self.build(places, variables, grads, are_scaled=True, weights=weights)

    def build(
        self,
        towers: Sequence[tuple[str, str]],  # [K] keys and devices
        variables: Sequence[Sequence[Any]],
        grads: RawGradients,
        *,
        are_scaled: bool,
        weights: Sequence[Any] | None = None,
        global_step: tf.Variable | None = None,
    ) -> tf.Tensor:
        """Builds a step, with state for new variables; returns whether any changed."""
        accumulates = self._settings.accumulation_steps is not None
        # Weighted steps have their own accumulators; others are saved as before.
        weighs = accumulates and weights is not None
        plain = tf_variables([v for tower in variables for v in tower])
        key = (weighs, *map(id, plain))
        is_new = key not in self._updaters
        with self.scope():
            if is_new:
                self._updaters[key] = Updater(
                    *(self._shared, self._settings, towers, variables), weighs=weighs
                )
            updater = self._updaters[key]
            updated = updater.step(
                grads, are_scaled=are_scaled, weights=weights, global_step=global_step
            )
        self.updater, self._grads, self._flags = updater, grads, None
        if is_new:
            for renew in self._shared.on_new_slots:
                renew()
        return updated

    def nonfinite_flags(self, updater: Updater) -> tf.Tensor:
        """Returns [K, N] bool, the same tensor at every call after a step."""
        if self._flags is None:
            check_still_usable(self._grads, updater.variables)
            with self.scope():
                self._flags = nonfinite_flags(self._grads, updater.devices)
        return self._flags

    def own_state(self) -> list[tf.Variable]:
        """Lists the state that is not shared."""
        return [v for updater in self._updaters.values() for v in updater.state()]

    def _renew_reset_op(self) -> None:
        # Made early, since the graph may be final when it is needed. Initialisers that
        # a branch or loop depended on would run with it, in every step.
        if self.updater is None:
            return
        counts = self._shared.scalars.counts()
        variables = [*self._shared.slots(), *counts, *self.own_state()]
        with tf.init_scope(), self.scope():
            self.reset_op = tf.group(*(v.initializer for v in variables), name="Reset")


def check_in_graph() -> None:
    """Refuses eager mode, and functions called from it."""
    check_session_graph(
        "Optimizer",
        instead="Use it inside tf.Graph().as_default(), or tw_ampopt.TowerOptimizer "
        "with tf.function.",
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
            f"trainable_vars must be on their loss's device; the loss {loss.name!r} is "
            f"on {loss.device!r}, but {', '.join(elsewhere)}. Compute the loss where "
            "its variables are: with tf.device(variable.device)."
        )


def _check_weights_usable(weights: Sequence[Any]) -> None:
    tensors = [weight for weight in weights if tf.is_tensor(weight)]
    check_same_graph(tensors, lambda _: "a weight")

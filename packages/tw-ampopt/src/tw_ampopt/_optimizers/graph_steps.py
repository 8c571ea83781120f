"""The steps of one optimizer in a session graph, and the state made for them.

State is made when the first step for a set of variables is built.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.gradients import check_still_usable
from tw_ampopt._settings import Settings, UpdateOptions
from tw_ampopt._update.buffers import RawGradients, nonfinite_flags
from tw_ampopt._update.state import SharedState
from tw_ampopt._update.update import Updater
from tw_ampopt._variables import are_local
from tw_core.checks import caller
from tw_core.modes import builds_session_graph
from tw_core.variables import tf_variables

_GATE_OP = 1  # v1's name for gradients that wait for each other


class GraphSteps:
    """Updaters, keyed by their variables, and the last step built."""

    def __init__(
        self,
        scope: str,
        settings: Settings,
        shared: SharedState,
        options: UpdateOptions,
    ) -> None:
        """Stores the settings, and the graph being built."""
        self.updater: Updater | None = None  # of the last step
        self.reset_op: tf.Operation | None = None
        self._scope = scope
        self._settings = settings
        self._shared = shared
        self._options = options
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
            scaled = shared.scaled(tf.cast(loss, tf.float32))
            return list(
                tf.compat.v1.gradients(scaled, plain, gate_gradients=gate, **options)
            )

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
        accumulates = self._options.accumulation_steps is not None
        # Weighted steps have their own accumulators: others are saved as they were.
        weighs = accumulates and weights is not None
        plain = tf_variables(v for tower in variables for v in tower)
        key = (weighs, *map(id, plain))
        is_new = key not in self._updaters
        with self.scope():
            if is_new:
                self._updaters[key] = Updater(
                    *(self._shared, self._options, towers, variables), weighs=weighs
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
        # Made early, as the graph may be final when it is needed. Initialisers that
        # a branch or loop depended on would run with it, at every step.
        if self.updater is None:
            return
        counts = self._shared.scalars.counts()
        variables = [*self._shared.slots(), *counts, *self.own_state()]
        with tf.init_scope(), self.scope():
            self.reset_op = tf.group(*(v.initializer for v in variables), name="Reset")


def check_in_graph() -> None:
    """Refuses eager mode, and functions called from it."""
    if not builds_session_graph():
        where = "eager mode" if tf.executing_eagerly() else "a tf.function"
        raise RuntimeError(
            f"{caller()}: builds a session graph; got {where}. Use it inside "
            "tf.Graph().as_default(), or tw_ampopt.TowerOptimizer with tf.function."
        )

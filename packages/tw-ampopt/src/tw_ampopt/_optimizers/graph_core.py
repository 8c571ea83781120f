"""What an ``Optimizer`` is made of: its state and updaters in one session graph."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.gradients import check_still_usable
from tw_ampopt._optimizers.copies_of_state import copy_from_first
from tw_ampopt._optimizers.settings import Settings, shared_with
from tw_ampopt._optimizers.statistics import nonfinite, statistics
from tw_ampopt._update.options import UpdateOptions
from tw_ampopt._update.state import SharedState
from tw_ampopt._update.tower_buffers import RawGradients
from tw_ampopt._update.update import Updater
from tw_ampopt._variables import are_local, identity
from tw_core import builds_session_graph


@dataclass
class Step:
    """What the last step that was built takes in.

    Attributes:
      updater: makes its updates.
      grads: [K][N][calls].
      devices: [K] the towers' devices.
      variables: [K][N].
      flags: [K, N] bool, which gradients are not finite; built on demand.
    """

    updater: Updater
    grads: RawGradients
    devices: list[str]
    variables: Sequence[Sequence[Any]]
    flags: tf.Tensor | None = None


class GraphCore:
    """State and updaters of one optimizer.

    Attributes:
      settings: what sharing optimizers agree on.
      shared: slots, scale and counts.
      step: the last step built, or None.
    """

    def __init__(
        self,
        scope: str,
        settings: Settings,
        options: UpdateOptions,
        share: "GraphCore | None",
    ) -> None:
        """Keeps the settings; ``share`` gives the shared part.

        Raises:
          ValueError: a ``share`` of other settings.
        """
        self.settings: Settings = settings
        self.shared: SharedState = shared_with(share, settings)
        self.shared.on_new_slots.append(self._renew_reset_op)
        self.step: Step | None = None
        self._reset_op: tf.Operation | None = None
        self._scope = scope
        self._options = options
        self._updaters: dict[tuple[int, ...], Updater] = {}
        with tf.init_scope():  # not the branch that may be in the building
            self._graph = tf.compat.v1.get_default_graph()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Enters the optimizer's graph and name scope."""
        with ExitStack() as stack:
            if tf.executing_eagerly():  # the graph was left since
                stack.enter_context(self._graph.as_default())
            stack.enter_context(tf.name_scope(f"{self._scope}/"))
            yield

    def log2(self, device: str) -> tf.Variable | None:
        """Returns the scale's variable, made beside ``device`` if it is not yet."""
        with self.scope():
            return self.shared.start(device).scale.log2

    def start_beside(self, variables: Sequence[tf.Variable]) -> SharedState:
        """Makes the scale beside variables, where there is none yet.

        Raises:
          RuntimeError: no graph is being built.
        """
        check_in_graph(self.settings.caller)
        with self.scope():
            self.shared.start(variables[0].device, local=are_local(variables))
        return self.shared

    def build_step(
        self,
        towers: Sequence[tuple[str, str]],
        variables: Sequence[Sequence[Any]],
        grads: RawGradients,
        *,
        are_scaled: bool,
        global_step: tf.Variable | None = None,
    ) -> tf.Tensor:
        """Builds a step, and the state of variables that are met for the first time.

        Args:
          towers: [K] keys and devices.
          variables: [K][N].
          grads: [K][N][calls].
          are_scaled: whether the gradients are those of the scaled loss.
          global_step: grows by 1 with an update.

        Returns:
          bool scalar, whether variables changed.
        """
        key = tuple(identity(variable) for tower in variables for variable in tower)
        is_new = key not in self._updaters
        with self.scope():
            if is_new:
                updater = Updater(self.shared, self._options, towers, variables)
                self._updaters[key] = updater
            updater = self._updaters[key]
            updated = updater.step(
                grads, are_scaled=are_scaled, global_step=global_step
            )
        self.step = Step(updater, grads, [device for _, device in towers], variables)
        if is_new:
            for renew in self.shared.on_new_slots:
                renew()
        return updated

    def built(self, method: str) -> Step:
        """Returns the last step built.

        Raises:
          RuntimeError: there is none.
        """
        if self.step is None:
            raise RuntimeError(
                f"{self.settings.caller}.{method}: nothing updates yet; call "
                "apply_updates or apply_gradients first."
            )
        return self.step

    def statistics(self) -> dict[str, tf.Tensor]:
        """Reads the state that the last step belongs to."""
        updater = self.built("statistics").updater
        with self.scope():
            return statistics(self.shared, updater, self.settings)

    def nonfinite_gradients(self) -> tf.Tensor:
        """Returns [K, N] bool, the same tensor at every call after a step.

        Raises:
          ValueError: the step was built in a branch or loop that is finished.
        """
        step = self.built("nonfinite_gradients")
        if step.flags is None:
            caller = f"{self.settings.caller}.nonfinite_gradients"
            check_still_usable(step.grads, step.variables, caller=caller)
            with self.scope():
                step.flags = nonfinite(step.grads, step.devices)
        return step.flags

    def copy_to_replicas(self) -> tf.Operation:
        """Returns the op that copies tower 0's variables and slots."""
        updater = self.built("copy_to_replicas").updater
        with self.scope():
            return copy_from_first(updater) or tf.no_op()

    def reset_op(self) -> tf.Operation:
        """Returns the op that puts back to the start all state but the scale.

        Raises:
          RuntimeError: there is no step yet.
        """
        if self._reset_op is None:
            raise RuntimeError(
                f"{self.settings.caller}.reset_op: there is no state yet; call "
                "apply_updates or apply_gradients first."
            )
        return self._reset_op

    def reset(self) -> None:
        """Runs ``reset_op`` in the default session.

        Raises:
          RuntimeError: no default session, or no op yet.
        """
        session = tf.compat.v1.get_default_session()
        if session is None:
            raise RuntimeError(
                f"{self.settings.caller}.reset_optimizer_state: there is no default "
                "session; call it inside `with session.as_default():`, or run reset_op."
            )
        session.run(self.reset_op())

    def variables(self) -> list[tf.Variable]:
        """Lists scale, counts, slots and accumulators."""
        scalars = self.shared.scalars.variables()
        return [*scalars, *self.shared.slots(), *self._own_state()]

    def _own_state(self) -> list[tf.Variable]:
        return [v for updater in self._updaters.values() for v in updater.state()]

    def _renew_reset_op(self) -> None:
        # Made ahead, as the graph may be finalised when it is wanted. Initialisers that
        # a branch or loop depended on would run with it, at every step.
        if self.step is None:
            return
        counts = self.shared.scalars.counts()
        variables = [*self.shared.slots(), *counts, *self._own_state()]
        with tf.init_scope(), self.scope():
            self._reset_op = tf.group(*(v.initializer for v in variables), name="Reset")


def check_in_graph(caller: str) -> None:
    """Refuses eager mode and functions that are called from there.

    Raises:
      RuntimeError: no session graph is being built.
    """
    if not builds_session_graph():
        where = "eager mode" if tf.executing_eagerly() else "a tf.function"
        raise RuntimeError(
            f"{caller}: builds a session graph; got {where}. Use it inside "
            "tf.Graph().as_default(), or tw_ampopt.TowerOptimizer with tf.function."
        )

"""What optimizers that share have in common: slots, scale, and counts of updates.

StyleGAN2 shares between an optimizer of the main loss and one of the regularisation
loss. Accumulators are never shared, since both fill theirs in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import tensorflow as tf

from tw_ampopt._loss_scale.rules import LossScale
from tw_ampopt._loss_scale.variables import LossScaleVariables
from tw_ampopt._update.buffers import Buffer, to_float32
from tw_ampopt._variables import host_of, make_state
from tw_ampopt._wrapped.wrapped_optimizer import WrappedOptimizer
from tw_core.gradients import map_values, scale
from tw_core.modes import builds_session_graph
from tw_core.variables import override_to_local_variable


@dataclass(frozen=True)
class Scalars:
    """The variables that steer and count updates.

    Attributes:
      host: where they live.
      scale: the loss scale.
      updates: counts updates made.
      skipped: counts updates skipped.
      mutex: names the mutex of the steps that accumulate.
    """

    host: str
    scale: LossScaleVariables
    updates: tf.Variable
    skipped: tf.Variable
    mutex: str

    def counts(self) -> list[tf.Variable]:
        """Lists the variables but for the scale itself."""
        return [self.updates, self.skipped, *self.scale.counts]

    def reset_counts(self) -> None:
        """Assigns to the counts the values they started with; not to the scale."""
        self.updates.assign(0)
        self.skipped.assign(0)
        self.scale.reset_counts()

    def variables(self) -> list[tf.Variable]:
        """Lists scale and counts."""
        log2 = self.scale.log2
        return [*([] if log2 is None else [log2]), *self.counts()]


class SlotRequest(NamedTuple):
    """Variables of one tower that an optimizer makes slots for.

    Attributes:
      key: the tower's.
      device: the tower's.
      variables: [N].
      local: whether a session graph's saver leaves the slots out.
    """

    key: str
    device: str
    variables: Sequence[Any]
    local: bool


class SharedState:
    """Made empty; the variables come when a device is known.

    Attributes:
      wrapped: the towers' optimizers, by the towers' keys.
      on_new_slots: called after steps that made slots; one function per sharer.
    """

    def __init__(
        self,
        rule: LossScale,
        make_wrapped: Callable[[int, tf.Variable], WrappedOptimizer],
    ) -> None:
        """Keeps how to make the state.

        Args:
          rule: how the scale moves.
          make_wrapped: makes an optimizer, from how many there are and the count of
            updates.
        """
        self._rule = rule
        self._make_wrapped = make_wrapped
        self._scalars: Scalars | None = None
        self._requests: list[SlotRequest] = []
        self.wrapped: dict[str, WrappedOptimizer] = {}
        self.on_new_slots: list[Callable[[], None]] = []

    @property
    def scalars(self) -> Scalars:
        """The scalars; the first device that needs them has them made."""
        return self.start("") if self._scalars is None else self._scalars

    def start(self, device: str, *, local: bool = False) -> Scalars:
        """Makes the scalars on the host of ``device``, unless they exist."""
        if self._scalars is None:
            host = host_of(device)
            variables = LossScaleVariables(self._rule, device=host, local=local)
            updates = make_state(0, name="updates", device=host, local=local)
            skipped = make_state(0, name="skipped_updates", device=host, local=local)
            mutex = f"{_unique_name(updates)}_mutex"
            self._scalars = Scalars(host, variables, updates, skipped, mutex)
        return self._scalars

    def build(self, new: SlotRequest) -> WrappedOptimizer:
        """Returns a tower's optimizer, made if new, with slots for variables.

        State is made outside of the branch or loop that a step is built in.
        """
        with tf.init_scope(), tf.device(new.device or None):
            if new.key not in self.wrapped:
                updates = self.scalars.updates
                self.wrapped[new.key] = self._make_wrapped(len(self.wrapped), updates)
            with override_to_local_variable(new.local):
                self.wrapped[new.key].build(new.variables)
        self._requests.append(new)
        return self.wrapped[new.key]

    def fresh_copy(self) -> "SharedState":
        """Makes the same state once more, with all slots in the same order."""
        other = SharedState(self._rule, self._make_wrapped)
        other.start(self.scalars.host)
        for request in self._requests:
            other.build(request)
        return other

    def scaled(self, value: Buffer) -> Buffer:
        """Multiplies a value of any floating dtype by the scale, in float32."""
        return _times(value, self.scalars.scale.scale())

    def unscaled(self, value: Buffer) -> Buffer:
        """Multiplies a value of any floating dtype by 1 / scale, in float32."""
        return _times(value, self.scalars.scale.inverse())

    def unscaled_gradients(self, grads: Sequence[Buffer | None]) -> list[Buffer | None]:
        """Unscales gradients into float32; None stays None."""
        inverse = self.scalars.scale.inverse()
        return [g if g is None else scale(to_float32(g), inverse) for g in grads]

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns the slot ``name`` of ``var`` in whichever optimizer has it."""
        slots = (own.get_slot(var, name) for own in self.wrapped.values())
        return next((slot for slot in slots if slot is not None), None)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots; none before an optimizer is made."""
        first = next(iter(self.wrapped.values()), None)
        return [] if first is None else first.get_slot_names()

    def slots(self) -> list[tf.Variable]:
        """Lists the optimizers' own variables, tower by tower."""
        return [v for own in self.wrapped.values() for v in own.variables()]


def _unique_name(variable: tf.Variable) -> str:
    # Sessions of one server share a variable by its name, and so also the mutex.
    # Outside of session graphs names repeat.
    return str(variable.op.name) if builds_session_graph() else uuid4().hex


def _times(value: Buffer, factor: tf.Tensor | None) -> Buffer:
    if factor is None:
        return value
    return map_values(
        lambda part: tf.cast(tf.cast(part, tf.float32) * factor, part.dtype), value
    )

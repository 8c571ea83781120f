"""What optimizers that share have in common: slots, scale, and counts of updates.

StyleGAN2 shares between an optimizer of the main loss and one of the regularisation
loss. Accumulators are never shared, since both fill theirs in turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import tensorflow as tf

from tw_ampopt._loss_scale.rules import ScaleRule
from tw_ampopt._loss_scale.variables import LossScale
from tw_ampopt._update.buffers import Buffer, scaled
from tw_ampopt._update.clean import to_float32
from tw_ampopt._variables import host_of, make_state
from tw_ampopt._wrapped.wrapped_optimizer import Inner
from tw_core import builds_session_graph, override_to_local_variable


@dataclass(frozen=True)
class Scalars:
    """The variables that steer and count updates.

    Attributes:
      host: where they live.
      scale: the loss scale.
      updates: counts updates made.
      skipped: counts updates left out.
      mutex: names the mutex of the steps that accumulate.
    """

    host: str
    scale: LossScale
    updates: tf.Variable
    skipped: tf.Variable
    mutex: str

    def counts(self) -> list[tf.Variable]:
        """Lists the counts; the scale itself is none of them."""
        return [self.updates, self.skipped, *self.scale.counts]

    def variables(self) -> list[tf.Variable]:
        """Lists scale and counts."""
        log2 = self.scale.log2
        return [*([] if log2 is None else [log2]), *self.counts()]


class Built(NamedTuple):
    """Variables of a tower for which an optimizer has made slots.

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
      inners: the towers' optimizers, by the towers' keys.
      on_new_slots: to be called after steps that made slots; one a sharer.
    """

    def __init__(
        self, rule: ScaleRule, make_inner: Callable[[int, Scalars], Inner]
    ) -> None:
        """Keeps how to make things.

        Args:
          rule: how the scale moves.
          make_inner: makes an optimizer, from how many there are and the scalars.
        """
        self._rule = rule
        self._make_inner = make_inner
        self._scalars: Scalars | None = None
        self._built: list[Built] = []
        self.inners: dict[str, Inner] = {}
        self.on_new_slots: list[Callable[[], None]] = []

    @property
    def scalars(self) -> Scalars:
        """The scalars; the first device that needs them has them made."""
        return self.start("") if self._scalars is None else self._scalars

    def start(self, device: str, *, local: bool = False) -> Scalars:
        """Makes the scalars beside ``device``, where they are not made yet."""
        if self._scalars is None:
            host = host_of(device)
            scale = LossScale(self._rule, device=host, local=local)
            updates = make_state(0, name="updates", device=host, local=local)
            skipped = make_state(0, name="skipped_updates", device=host, local=local)
            mutex = f"{_name_of_one(updates)}_mutex"
            self._scalars = Scalars(host, scale, updates, skipped, mutex)
        return self._scalars

    def build(self, new: Built) -> Inner:
        """Returns a tower's optimizer, made if new, with slots for variables.

        State is made outside of the branch or loop that a step is built in.
        """
        with tf.init_scope(), tf.device(new.device or None):
            if new.key not in self.inners:
                self.inners[new.key] = self._make_inner(len(self.inners), self.scalars)
            with override_to_local_variable(new.local):
                self.inners[new.key].build(new.variables)
        self._built.append(new)
        return self.inners[new.key]

    def anew(self) -> "SharedState":
        """Makes the same state once more, with all slots in the same order."""
        other = SharedState(self._rule, self._make_inner)
        other.start(self.scalars.host)
        for built in self._built:
            other.build(built)
        return other

    def scaled(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a value of any floating dtype by the scale, in float32."""
        return _times(value, self.scalars.scale.scale())

    def unscaled(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies a value of any floating dtype by 1 / scale, in float32."""
        return _times(value, self.scalars.scale.inverse())

    def unscaled_gradients(self, grads: Sequence[Buffer | None]) -> list[Buffer | None]:
        """Unscales gradients into float32; None stays None."""
        inverse = self.scalars.scale.inverse()
        return [
            None if grad is None else scaled(to_float32(grad), inverse)
            for grad in grads
        ]

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns the slot ``name`` of ``var`` in whichever optimizer has it."""
        slots = (inner.get_slot(var, name) for inner in self.inners.values())
        return next((slot for slot in slots if slot is not None), None)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots; none before an optimizer is made."""
        inner = next(iter(self.inners.values()), None)
        return [] if inner is None else inner.get_slot_names()

    def slots(self) -> list[tf.Variable]:
        """Lists the optimizers' own variables, tower by tower."""
        return [v for inner in self.inners.values() for v in inner.variables()]


def _name_of_one(variable: tf.Variable) -> str:
    # Sessions of one server share a variable by its name, and so also the mutex.
    # Outside of session graphs names repeat.
    return str(variable.op.name) if builds_session_graph() else uuid4().hex


def _times(value: tf.Tensor, factor: tf.Tensor | None) -> tf.Tensor:
    if factor is None:
        return value
    if isinstance(value, tf.IndexedSlices):
        rows = _times(value.values, factor)
        return tf.IndexedSlices(rows, value.indices, value.dense_shape)
    product = tf.cast(value, tf.float32) * factor
    return tf.cast(product, value.dtype)

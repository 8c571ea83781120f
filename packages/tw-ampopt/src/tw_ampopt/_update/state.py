"""The state that optimizers can share: slots, scale, and counts of updates.

StyleGAN2 shares it between the optimizers of the main loss and of the regularisation
loss. Accumulators are never shared, since both fill theirs in turn. One scale serves
all towers: it lives on one host, and every tower reads it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

import tensorflow as tf

from tw_ampopt._checks.arguments import graphs_around
from tw_ampopt._loss_scale import LossScale
from tw_ampopt._update.buffers import Buffer, to_wide
from tw_ampopt._variables import host_of, make_state, present
from tw_ampopt._wrapped.wrapped_optimizer import WrappedOptimizer
from tw_core.internal import (
    builds_session_graph,
    map_values,
    orders_effects,
    scale,
    weight_dtype,
)
from tw_core.variables import override_to_local_variable

_LOG2 = "log2"
_LOG2_ITSELF = 0  # the other keys are the signs 1 and -1
_VARIABLE_NAMES = {_LOG2: "loss_scaling_var"}  # the older system's name


class Scalars:
    """The variables that control and count updates."""

    def __init__(self, rule: LossScale, host: str) -> None:
        self.host = host
        self._rule = rule
        self._state = {
            key: make_state(value, name=_VARIABLE_NAMES.get(key, key), device=host)
            for key, value in rule.initial().items()
        }
        self.updates = make_state(0, name="updates", device=host)
        self.skipped = make_state(0, name="skipped_updates", device=host)
        # For steps that accumulate. Sessions of one server share variables by name, so
        # they must share the mutex. Outside of session graphs, names repeat.
        unique = self.updates.op.name if builds_session_graph() else uuid4().hex
        self.mutex = f"{unique}_mutex"
        # Scaling and unscaling must see the same value. If nothing orders reads and
        # updates, the graph (of a session, or of wrap_function) reads once, and its
        # branches and loops use that value.
        self._reads: dict[tf.Graph, dict[int, tf.Tensor]] = {}

    @property
    def log2(self) -> tf.Variable | None:
        """The variable that holds the scale's log2; None without scaling."""
        return self._state.get(_LOG2)

    def counts(self) -> list[tf.Variable]:
        """Lists the variables except the scale's log2."""
        own = [variable for key, variable in self._state.items() if key != _LOG2]
        return [self.updates, self.skipped, *own]

    def variables(self) -> list[tf.Variable]:
        """Lists the scale's log2, where there is one, and the counts."""
        return [*present([self.log2]), *self.counts()]

    def reset_counts(self) -> None:
        """Assigns the initial values to the counts, but not to the log2."""
        self.updates.assign(0)
        self.skipped.assign(0)
        for key, start in self._rule.initial().items():
            if key != _LOG2:
                self._state[key].assign(start)

    def scale(self, dtype: tf.DType = tf.float32) -> tf.Tensor | None:
        """Returns the scale, computed in float32; None without scaling."""
        scale = self._two_to_the(1)
        return None if scale is None else tf.cast(scale, dtype)

    def inverse(self, dtype: tf.DType = tf.float32) -> tf.Tensor | None:
        """Returns 1 / scale; None without scaling."""
        if dtype == tf.float32 or self.log2 is None:
            return self._two_to_the(-1)
        return tf.math.reciprocal(self.scale(dtype))  # The other is rounded, too.

    def move_scale(self, good: tf.Tensor) -> list[tf.Operation]:
        """Returns the rule's assignments to the scale's state, after an update."""
        if self.log2 is None:
            return []
        with tf.device(self.log2.device):
            state = {key: value.read_value() for key, value in self._state.items()}
            return [
                self._state[key].assign(value, read_value=False)
                for key, value in self._rule.next(state, good).items()
            ]

    def _two_to_the(self, sign: int) -> tf.Tensor | None:
        if self.log2 is None:
            return None
        if orders_effects():
            # Read at every use: an update may intervene, even one in a function
            # that is not traced again.
            with tf.device(self.log2.device):
                return self._rule.scale(sign * self.log2.read_value())
        made = self._made_in(tf.compat.v1.get_default_graph())
        with tf.control_dependencies(None), tf.device(self.log2.device):
            if _LOG2_ITSELF not in made:
                made[_LOG2_ITSELF] = self.log2.read_value()
            if sign in made:
                return made[sign]
            scale = self._rule.scale(sign * made[_LOG2_ITSELF])
        if scale.graph is made[_LOG2_ITSELF].graph:
            made[sign] = scale
        return scale

    def _made_in(self, graph: tf.Graph) -> dict[int, tf.Tensor]:
        enclosing = list(graphs_around(graph))
        # All other graphs are finished; those of wrap_function must not be kept alive.
        self._reads = {g: self._reads[g] for g in enclosing if g in self._reads}
        nearest = next((g for g in enclosing if g in self._reads), graph)
        return self._reads.setdefault(nearest, {})


class SlotRequest(NamedTuple):
    """Variables of one tower for which an optimizer makes slots."""

    key: str
    device: str
    variables: Sequence[Any]
    local: bool  # whether a session graph's saver leaves the slots out


class SharedState:
    """The shared state, whose variables are made once a device is known."""

    def __init__(
        self,
        rule: LossScale,
        make_wrapped: Callable[[int, tf.Variable], WrappedOptimizer],
    ) -> None:
        self._rule = rule
        self._make_wrapped = make_wrapped
        self._scalars: Scalars | None = None
        self._requests: list[SlotRequest] = []
        self.wrapped: dict[str, WrappedOptimizer] = {}  # by the towers' keys
        self.on_new_slots: list[Callable[[], None]] = []  # one per sharing optimizer

    @property
    def scalars(self) -> Scalars:
        """The scalars, made on first use."""
        return self.start("") if self._scalars is None else self._scalars

    def start(self, device: str, *, local: bool = False) -> Scalars:
        """Makes the scalars on the host of ``device``, unless they exist."""
        if self._scalars is None:
            with tf.init_scope(), override_to_local_variable(local):
                self._scalars = Scalars(self._rule, host_of(device))
        return self._scalars

    def build(self, new: SlotRequest) -> WrappedOptimizer:
        """Returns a tower's optimizer, made if new, with slots for variables."""
        with tf.init_scope(), tf.device(new.device or None):
            if new.key not in self.wrapped:
                self.wrapped[new.key] = self._make_wrapped(
                    len(self.wrapped), self.scalars.updates
                )
            with override_to_local_variable(new.local):
                self.wrapped[new.key].build(new.variables)
        self._requests.append(new)
        return self.wrapped[new.key]

    def fresh_copy(self) -> "SharedState":
        """Makes a copy in its initial state, with all slots in the same order."""
        other = SharedState(self._rule, self._make_wrapped)
        other.start(self.scalars.host)
        for request in self._requests:
            other.build(request)
        return other

    def scaled(self, value: Buffer) -> Buffer:
        """Multiplies a value of any floating dtype by the scale."""
        return _times(value, self.scalars.scale(weight_dtype([value])))

    def unscaled(self, value: Buffer) -> Buffer:
        """Multiplies a value of any floating dtype by 1 / scale."""
        return _times(value, self.scalars.inverse(weight_dtype([value])))

    def unscaled_gradients(self, grads: Sequence[Buffer | None]) -> list[Buffer | None]:
        """Unscales gradients, those of half precision in float32; None stays None."""
        inverse = self.scalars.inverse(weight_dtype(g for g in grads if g is not None))
        return [g if g is None else scale(to_wide(g), inverse) for g in grads]

    def slots(self) -> list[tf.Variable]:
        """Lists the optimizers' own variables, tower by tower."""
        return [v for own in self.wrapped.values() for v in own.variables()]


def _times(value: Buffer, factor: tf.Tensor | None) -> Buffer:
    if factor is None:
        return value
    return map_values(
        lambda part: tf.cast(tf.cast(part, factor.dtype) * factor, part.dtype), value
    )

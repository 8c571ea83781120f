"""Float32 master copies of half-precision variables.

A half-precision variable cannot hold small updates. The optimizer updates a float32
master instead, and the variable is the master, rounded. Where rounding the master
does not give the variable, the variable has been assigned since (by a restore, or a
copy between towers), and the master takes its value: so masters need no care of
their own.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._variables import are_local, identity, make_state, present
from tw_ampopt._wrapped.wrapped_optimizer import WrappedOptimizer
from tw_core.variables import override_to_local_variable, tf_variable

_HALF = (tf.float16, tf.bfloat16)


class MasterWeights:
    """A wrapped optimizer that updates masters in place of half variables."""

    def __init__(self, wrapped: WrappedOptimizer) -> None:
        """Wraps ``wrapped`` once more."""
        self._wrapped = wrapped
        self._masters: dict[int, tf.Variable] = {}

    def build(self, variables: Sequence[Any]) -> None:
        """Makes masters and slots."""
        self._wrapped.build([self._master_of(variable) for variable in variables])

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Updates masters, then the variables; returns the last assignments."""
        pairs = [(self._master_of(v), v) for v in variables]
        halves = [(m, tf_variable(v)) for m, v in pairs if m is not v]
        follow = [_follow(master, variable) for master, variable in halves]
        with tf.control_dependencies(follow):
            # Carries the dependency into functions that optimizers call.
            grads = [_identity(grad) for grad in grads]
            updated = present([self._wrapped.apply(grads, [m for m, _ in pairs])])
        with tf.control_dependencies(updated):
            rounded = [_round_into(variable, master) for master, variable in halves]
        return tf.group(*updated, *present(rounded))

    def variables(self) -> list[tf.Variable]:
        """Lists the optimizer's variables, then the masters."""
        return [*self._wrapped.variables(), *self._masters.values()]

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns the slot of ``var``, or of its master."""
        return self._wrapped.get_slot(self._masters.get(identity(var), var), name)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots."""
        return self._wrapped.get_slot_names()

    def _master_of(self, variable: Any) -> Any:
        if tf.as_dtype(variable.dtype) not in _HALF:
            return variable
        if identity(variable) not in self._masters:
            name = f"{variable.name.split(':')[0].replace('/', '_')}_master"
            with override_to_local_variable(are_local([variable])):
                self._masters[identity(variable)] = make_state(
                    lambda: tf.zeros(variable.shape, tf.float32),
                    name=name,
                    device=tf_variable(variable).device,
                )
        return self._masters[identity(variable)]


def _follow(master: tf.Variable, variable: tf.Variable) -> Any:
    with tf.device(variable.device):
        held, shown = master.read_value(), variable.read_value()
        same = tf.equal(tf.cast(held, shown.dtype), shown)
        value = tf.where(same, held, tf.cast(shown, tf.float32))
        return master.assign(value, read_value=False)


def _round_into(variable: tf.Variable, master: tf.Variable) -> Any:
    with tf.device(variable.device):
        rounded = tf.cast(master.read_value(), variable.dtype)
        return variable.assign(rounded, read_value=False)


def _identity(grad: Any) -> Any:
    if not isinstance(grad, tf.IndexedSlices):
        return tf.identity(grad)
    parts = (grad.values, grad.indices, grad.dense_shape)
    return tf.IndexedSlices(*(p if p is None else tf.identity(p) for p in parts))

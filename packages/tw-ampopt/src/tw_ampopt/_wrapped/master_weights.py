"""Float32 master copies of half-precision variables.

A half-precision variable cannot hold small updates. The optimizer updates a float32
master instead, and the variable is the master, rounded. Where rounding the master
does not give the variable, somebody has assigned the variable since (a restore, a
copy between towers), and the master takes the variable's value: so masters need no
care of their own.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._variables import are_local, as_tf_variable, identity, make_state
from tw_ampopt._wrapped.wrapped_optimizer import Inner, identity_of

_HALF = (tf.float16, tf.bfloat16)


class WithMasters:
    """An inner optimizer that updates masters in place of half variables."""

    def __init__(self, inner: Inner) -> None:
        """Wraps ``inner``."""
        self._inner = inner
        self._masters: dict[int, tf.Variable] = {}

    def build(self, variables: Sequence[Any]) -> None:
        """Makes masters and slots."""
        self._inner.build([self._master_of(variable) for variable in variables])

    def apply(self, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Updates masters, then the variables; returns the last assignments."""
        masters = [self._master_of(variable) for variable in variables]
        follow = [
            _follow(master, as_tf_variable(variable))
            for master, variable in zip(masters, variables, strict=True)
            if master is not variable
        ]
        with tf.control_dependencies(follow):
            # Carries the dependency into functions that optimizers call.
            grads = [identity_of(grad) for grad in grads]
            updated = self._inner.apply(grads, masters)
        with tf.control_dependencies(_present(updated)):
            rounded = [
                _round_into(as_tf_variable(variable), master)
                for master, variable in zip(masters, variables, strict=True)
                if master is not variable
            ]
        return tf.group(*_present(updated), *rounded)

    def variables(self) -> list[tf.Variable]:
        """Lists the optimizer's variables, then the masters."""
        return [*self._inner.variables(), *self._masters.values()]

    def get_slot(self, var: Any, name: str) -> tf.Variable | None:
        """Returns the slot of ``var``, or of its master."""
        return self._inner.get_slot(self._masters.get(identity(var), var), name)

    def get_slot_names(self) -> list[str]:
        """Lists the names of the slots."""
        return self._inner.get_slot_names()

    def _master_of(self, variable: Any) -> Any:
        if tf.as_dtype(variable.dtype) not in _HALF:
            return variable
        if identity(variable) not in self._masters:
            name = f"{variable.name.split(':')[0].replace('/', '_')}_master"
            self._masters[identity(variable)] = make_state(
                lambda: tf.zeros(variable.shape, tf.float32),
                name=name,
                device=as_tf_variable(variable).device,
                local=are_local([as_tf_variable(variable)]),
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


def _present(op: Any) -> list[Any]:
    return [] if op is None else [op]

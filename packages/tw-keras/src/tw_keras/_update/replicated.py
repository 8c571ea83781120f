"""Placement of an update where each tower has the variables and an optimizer's state.

One optimizer serves all towers: its update is traced with its own variables and called
with theirs. Eagerly, tower 0 updates, and the others copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core import Tower
from tw_core.internal import (
    apply_by_keras,
    call_once,
    copy_values,
    is_variable,
    placing_calls,
    tf_variable,
    values_of,
)
from tw_keras import _batches
from tw_keras._keras_compat import trained_by
from tw_keras._update.gradients import Rows
from tw_keras._update.places import Terms, WithCopies


@dataclass(frozen=True, eq=False)
class _State:
    variables: list[tf.Variable]


class Replicated(WithCopies):
    """Every tower applies the reduced gradients to its copy."""

    _states: Sequence[Any] = ()

    @property
    def states(self) -> list[Any]:
        """[K] towers' state, the first being the optimizer; none before it is made."""
        return list(self._states)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state of all towers; ``variables`` are tower 0's."""
        with tf.init_scope():
            with tf.device(self._towers[0].device):
                if not self._optimizer.built:
                    self._optimizer.build(list(variables))
            if not self._states:
                own, others = list(self._optimizer.variables), self._towers[1:]
                self._states = [self._optimizer, *(_copies(own, at) for at in others)]

    def make_equal(self) -> None:
        """Copies tower 0's state to the other towers."""
        if len(self._states) > 1:
            copy_values([state.variables for state in self._states])

    def targets(self, variables: Sequence[Any]) -> Rows:
        """Returns the [K][M] towers' variables."""
        return self._of_towers(variables)

    def accumulators(self, variables: Sequence[Any]) -> Rows:
        """Returns the [K][M] accumulators of gradients."""
        known = {id(tf_variable(v)): n for n, v in enumerate(self._optimizer.variables)}
        [slots] = super().accumulators(variables)
        places = [known[id(own)] for own in slots]
        return [
            [tf_variable(state.variables[n]) for n in places] for state in self._states
        ]

    def apply(self, rows: Rows, variables: Sequence[Any], terms: Terms) -> None:
        """Updates all towers with [K][M] gradients, or with [1][M] for all."""
        with tf.name_scope("apply_gradients"):  # for timelines
            if tf.executing_eagerly():  # The others copy tower 0 after the step.
                with tf.device(self._towers[0].device):
                    _apply(self._optimizer, rows[0], variables)
                return
            columns = self._of_towers(variables)
            if len(columns) == 1 and not terms.jit_compile:
                with tf.device(self._towers[0].device):
                    _apply(self._optimizer, rows[0], columns[0])
                return
            every = rows if len(rows) == len(columns) else [*rows] * len(columns)
            # Averages of weights are of all, also of those without a gradient.
            trained = self._of_towers(trained_by(self._optimizer))
            self._follow_learning_rate()
            call_once(
                _apply,
                list(
                    zip(self._states, map(list, every), columns, trained, strict=True)
                ),
                [partial(placing_calls, tower) for tower in self._towers],
                jit_compile=terms.jit_compile,
            )

    def _follow_learning_rate(self) -> None:
        """Copies the learning rate of tower 0's optimizer, which callbacks change."""
        rate = getattr(self._optimizer, "learning_rate", None)
        if not is_variable(rate):  # a schedule by iterations
            return
        for n, variable in enumerate(map(tf_variable, self._optimizer.variables)):
            if variable is tf_variable(rate):  # not a function's, which towers share
                for state in self._states[1:]:
                    state.variables[n].assign(variable)


def _apply(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], *_: Any
) -> None:
    # After the data's end an inlined call still runs what does not read it.
    with _batches.after([values_of(grad) for grad in grads]):
        apply_by_keras(optimizer, list(zip(grads, variables, strict=True)))


def _copies(variables: Sequence[Any], tower: Tower) -> _State:
    with tf.device(tower.device):
        made = [
            tf.Variable(tf_variable(own).read_value(), trainable=own.trainable)
            for own in variables
        ]
    return _State(made)

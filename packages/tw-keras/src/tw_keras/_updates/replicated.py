"""Updates where each tower has copies of the variables and an optimizer's state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core import Tower, copy_to_replicas
from tw_core.internal import (
    apply_pairs,
    call_once,
    create_slots,
    is_elementwise,
    is_variable,
    scale,
    tf_variable,
    values_of,
)
from tw_keras import _batches
from tw_keras._updates.accumulation import scale_of
from tw_keras._updates.update import Brought, Update, with_gradients
from tw_reduce import mean


class OptimizerStates:
    """The towers' state of tower 0's optimizers.

    One optimizer serves all towers: its update is traced with its own variables and
    called with theirs.
    """

    def __init__(self, towers: Sequence[Tower]) -> None:
        self._towers = towers
        self._made: dict[int, list[Any]] = {}

    def of(self, optimizer: Any, variables: Sequence[Any]) -> list[Any]:
        """Returns [K] states, tower 0's being ``optimizer``; creates missing ones.

        ``variables`` are tower 0's, for an optimizer that is not built yet.
        """
        with tf.init_scope():
            with tf.device(self._towers[0].device):
                create_slots(optimizer, variables)
            states = self._made.setdefault(id(optimizer), [optimizer])
            if len(states) == 1:
                own = list(optimizer.variables)
                states += [_copies(own, tower) for tower in self._towers[1:]]
        return states

    def known(self, optimizer: Any) -> list[Any]:
        """Returns the states of an optimizer, which may have none yet."""
        return self._made.get(id(optimizer), [])

    def make_equal(self, optimizers: Sequence[Any]) -> None:
        """Copies tower 0's states to the other towers."""
        for optimizer in optimizers:
            states = self.known(optimizer)
            if len(states) > 1:
                own = [tf_variable(v) for v in optimizer.variables]
                copy_to_replicas([own, *(state.variables for state in states[1:])])


@dataclass(frozen=True, eq=False)
class _State:
    variables: list[tf.Variable]


def _copies(variables: Sequence[Any], tower: Tower) -> _State:
    with tf.device(tower.device):
        made = [
            tf.Variable(tf_variable(own).read_value(), trainable=own.trainable)
            for own in variables
        ]
    return _State(made)


def apply_replicated(update: Update, brought: Sequence[Brought]) -> None:
    """Every tower applies the reduced gradients to its copy.

    In a ``tf.function`` the optimizer is traced once and called with every tower's
    variables; eagerly tower 0 updates, and the others copy.
    """
    optimizer = update.optimizer
    states = update.states(optimizer, brought[0].variables)
    kept = with_gradients(brought)
    reduced = [list(own.grads) for own in kept]
    reducer = update.reducer
    if not update.is_reduced and reducer is not None:
        summing = mean(reducer, weights=update.weights) if update.average else reducer
        if is_elementwise(reducer):
            reduced = [list(own) for own in summing(reduced)]
        else:  # Such a reducer gets unscaled gradients.
            loss_scale = scale_of(optimizer)
            unscaled = [[scale(g, 1.0 / loss_scale) for g in own] for own in reduced]
            sums = summing(unscaled)
            reduced = [[scale(total, loss_scale) for total in own] for own in sums]
    variables = [list(own.variables) for own in kept]
    every = [own.variables for own in brought]  # Averages are of all.

    def apply(optimizer: Any, grads: list[Any], variables: list[Any], *_: Any) -> None:
        # After the data's end an inlined call still runs what does not read it.
        with _batches.after([values_of(grad) for grad in grads]):
            apply_pairs(optimizer, list(zip(grads, variables, strict=True)))

    is_one = len(brought) == 1 and not update.compiled_by_xla
    with tf.name_scope("apply_gradients"):  # for timelines
        if tf.executing_eagerly() or is_one:
            with tf.device(update.towers[0].device):
                apply(optimizer, reduced[0], variables[0])
            copy_to_replicas(variables)
            return
        _follow_learning_rate(optimizer, states)
        call_once(
            apply,
            list(zip(states, reduced, variables, every, strict=True)),
            [tower.scope for tower in update.towers],
            jit_compile=update.compiled_by_xla,
        )


def _follow_learning_rate(optimizer: Any, states: Sequence[Any]) -> None:
    """Copies the learning rate of tower 0's optimizer, which callbacks change."""
    rate = getattr(optimizer, "learning_rate", None)
    if not is_variable(rate):  # a schedule by iterations
        return
    for n, variable in enumerate(map(tf_variable, optimizer.variables)):
        if variable is tf_variable(rate):  # not a function's, which towers share
            for state in states[1:]:
                state.variables[n].assign(variable)

"""How the towers' gradients become updates.

It depends on where the variables are: each tower has copies and an optimizer, or copies
each of which one tower updates for all, or all towers share one set.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tw_builders._apply import apply_gradients, apply_shared_gradients
from tw_builders._owners import owned
from tw_builders._sharded import apply_sharded_gradients
from tw_core import Tower
from tw_core.optimizers import create_slots
from tw_reduce import Reducer, mean


@dataclass(frozen=True)
class Brought:
    """A tower's arguments to its optimizer's ``apply``: [N] each, gradients or None."""

    grads: Sequence[Any]
    variables: Sequence[Any]


@dataclass(frozen=True)
class Update:
    """One update by all towers."""

    towers: Sequence[Tower]
    optimizers: Sequence[Any]  # [K], or one for all
    weights: Sequence[Any] | None  # [K]; None for equal ones
    average: bool
    reducer: Reducer


def apply_replicated(update: Update, brought: Sequence[Brought]) -> None:
    """Every tower applies the reduced gradients to its copy, with its own optimizer."""
    with tf.init_scope():
        for tower, optimizer, own in zip(
            update.towers, update.optimizers, brought, strict=True
        ):
            with tf.device(tower.device):
                create_slots(optimizer, own.variables)
    _follow_learning_rate(update.optimizers)
    kept = _with_gradients(brought)
    grads = [own.grads for own in kept]
    reducer = update.reducer
    if update.average:
        reducer = mean(reducer, weights=update.weights)
    variables = [own.variables for own in kept]
    apply_gradients(update.towers, reducer(grads), variables, update.optimizers)


def apply_sharded(update: Update, brought: Sequence[Brought]) -> None:
    """Each variable's owner applies the reduced gradient, and the others copy it."""
    optimizer = update.optimizers[0]
    with tf.init_scope(), tf.device(update.towers[0].device):
        create_slots(optimizer, owned([own.variables for own in brought]))
    kept = _with_gradients(brought)
    apply_sharded_gradients(
        update.towers,
        [own.grads for own in kept],
        [own.variables for own in kept],
        optimizer,
        average=update.average,
        weights=update.weights,
    )


def apply_shared(update: Update, brought: Sequence[Brought]) -> None:
    """The reduced gradients are applied once, where the variables live."""
    optimizer = update.optimizers[0]
    with tf.init_scope():
        create_slots(optimizer, brought[0].variables)
    pairs = [
        list(zip(own.grads, own.variables, strict=True))
        for own in _with_gradients(brought)
    ]
    apply_shared_gradients(
        pairs, optimizer, average=update.average, weights=update.weights
    )


def apply_wrapped(update: Update, brought: Sequence[Brought]) -> None:
    """An optimizer over towers takes all gradients, and reduces them itself."""
    optimizer = update.optimizers[0]
    with tf.device(update.towers[0].device):
        optimizer.wrapped.apply(
            [list(own.grads) for own in brought], weights=update.weights
        )
        optimizer.iterations.assign_add(1)


APPLY: dict[str, Callable[[Update, Sequence[Brought]], None]] = {
    "replicated": apply_replicated,
    "sharded": apply_sharded,
    "parameter_server": apply_shared,
}


def _with_gradients(brought: Sequence[Brought]) -> list[Brought]:
    """Leaves out the variables that have a gradient in no tower, as Keras does."""
    used = [
        n
        for n in range(len(brought[0].grads))
        if any(own.grads[n] is not None for own in brought)
    ]
    return [
        Brought([own.grads[n] for n in used], [own.variables[n] for n in used])
        for own in brought
    ]


def _follow_learning_rate(optimizers: Sequence[Any]) -> None:
    """Copies the learning rate of tower 0's optimizer, which callbacks change."""
    rate = getattr(optimizers[0], "learning_rate", None)
    if isinstance(rate, keras.Variable):  # else a schedule of the iterations
        for optimizer in optimizers[1:]:
            optimizer.learning_rate.assign(rate.value)

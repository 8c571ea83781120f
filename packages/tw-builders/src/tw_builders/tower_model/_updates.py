"""How gradients that towers bring to an optimizer become updates.

Where the variables live decides it: each tower has a copy and an optimizer, or a copy
of which one tower's is updated and copied, or all share one.
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
    """What a tower brings to an optimizer.

    Attributes:
      grads: [N] gradients or None.
      variables: [N] the tower's.
    """

    grads: Sequence[Any]
    variables: Sequence[Any]


@dataclass(frozen=True)
class Update:
    """One update by all towers.

    Attributes:
      towers: K towers.
      optimizers: [K] the towers', or one that all have.
      weights: [K] of the mean, or None for equal ones.
      average: whether to take the mean, or the sum.
      reducer: gives every tower the sums.
    """

    towers: Sequence[Tower]
    optimizers: Sequence[Any]
    weights: Sequence[Any] | None
    average: bool
    reducer: Reducer


def apply_replicated(update: Update, brought: Sequence[Brought]) -> None:
    """Every tower applies the reduced gradients to its copy, by its own optimizer."""
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
    """Gives all optimizers the rate of tower 0's, which callbacks change."""
    rate = getattr(optimizers[0], "learning_rate", None)
    if isinstance(rate, keras.Variable):  # else it follows from the iterations
        for optimizer in optimizers[1:]:
            optimizer.learning_rate.assign(rate.value)

"""How an update is applied, by the ``variables`` of a ``TowerModel``."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_builders import apply_shared_gradients
from tw_core.internal import create_slots
from tw_keras._updates.replicated import apply_replicated
from tw_keras._updates.sharded import apply_sharded
from tw_keras._updates.update import Brought, Update, times, with_gradients


def apply_shared(update: Update, brought: Sequence[Brought]) -> None:
    """Applies the reduced gradients once, where the variables are."""
    optimizer = update.optimizer
    with tf.init_scope():
        create_slots(optimizer, brought[0].variables)
    pairs = [
        list(zip(own.grads, own.variables, strict=True))
        for own in with_gradients(brought)
    ]
    if update.is_reduced:
        pairs = pairs[:1]
    apply_shared_gradients(
        *(pairs, optimizer),
        average=update.average,
        weights=update.weights,
        jit_compile=update.compiled_by_xla,
    )


def apply_wrapped(update: Update, brought: Sequence[Brought]) -> None:
    """Passes all gradients to an optimizer over towers, which reduces them itself."""
    optimizer = update.optimizer
    if not (update.average or update.is_reduced):  # Losses are added; it averages.
        brought = times(brought, [len(brought)] * len(brought))
    with tf.device(update.towers[0].device):
        given: dict[str, Any] = {
            "weights": update.weights,
            "jit_compile": update.compiled_by_xla,
        }
        if update.group is not None:
            given["group"] = update.group
        optimizer.wrapped.apply([list(own.grads) for own in brought], **given)
        optimizer.iterations.assign_add(1)


APPLY: dict[str, Callable[[Update, Sequence[Brought]], None]] = {
    "replicated": apply_replicated,
    "sharded": apply_sharded,
    "parameter_server": apply_shared,
}

"""Accumulation by Keras's optimizers: towers add locally, and reduce once per update.

With ``gradient_accumulation_steps`` an optimizer applies the mean of several batches'
gradients. Each tower adds its shares to sums of its own. When an update is due, these
are reduced, once, into the optimizer's own accumulators, which are saved; the optimizer
itself receives zeros in every step, so that it counts and averages as usual.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core import Tower
from tw_core.internal import add_to_sums, clear_sums, make_sums, tf_variable
from tw_keras import _batches
from tw_keras._keras_compat import counter_of, inner_of
from tw_keras._update.gradients import NARROW, Rows
from tw_keras._update.optimizers import is_update_due
from tw_keras._update.places import Place

Reduce = Callable[[Rows, Sequence[Any]], Rows]


class Accumulation:
    """The sums of an optimizer's gradients, in each tower."""

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        towers: Sequence[Tower],
        place: Place,
        *,
        at_once: tf.Variable,
        all_true: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        """Takes all of tower 0's variables, in the order of the optimizer's.

        ``at_once``: whether all steps reduce; ``all_true``: over the ranks.
        """
        self._optimizer, self._inner = optimizer, inner_of(optimizer)
        self._variables, self._towers, self._place = variables, towers, place
        self._at_once, self._all_true = at_once, all_true
        self._places = {id(tf_variable(own)): n for n, own in enumerate(variables)}
        specs = list(map(_spec_of_sum, variables))
        self._sums = []
        for tower in towers:
            with tf.init_scope(), tf.device(tower.device):
                self._sums.append(make_sums(specs))

    def __call__(
        self, shares: Rows, variables: Sequence[Any], reduce: Reduce
    ) -> tuple[Rows, tf.Tensor]:
        """Adds [K][M] shares; returns [T][M] gradients to apply, and if this updates.

        The gradients are zeros, or NaN if shares are not finite and the loss is scaled.
        """
        places = [self._places[id(tf_variable(own))] for own in variables]
        held = [[own[n] for n in places] for own in self._sums[: len(shares)]]
        is_finite = self._are_finite(shares)
        with _batches.after(list(shares)):
            is_update = is_update_due(self._inner)
            if is_finite is not None:
                is_update = tf.logical_and(is_update, is_finite)
            is_due = tf.logical_or(is_update, self._at_once)
            if is_finite is not None:
                is_due = tf.logical_and(is_due, is_finite)
        for tower, own, added in zip(self._towers, held, shares, strict=False):
            with tf.device(tower.device):
                if is_finite is not None:
                    added = [tf.where(is_finite, g, tf.zeros_like(g)) for g in added]
                add_to_sums(own, added)

        def reduced() -> tf.Tensor:
            self._move(held, variables, reduce)
            return tf.constant(True)

        # The branch captures only variables, so that tensors stay on their devices.
        is_reduced = tf.cond(is_due, reduced, lambda: tf.constant(False))
        self._clear(held, is_update)
        with tf.control_dependencies([is_reduced]):
            fill = tf.zeros([], tf.float64)
            if is_finite is not None:
                fill = tf.where(is_finite, fill, float("nan"))
        targets = self._place.targets(variables)
        return [[_filled(own, fill) for own in row] for row in targets], is_update

    def settle(self, reduce: Reduce | None) -> None:
        """Moves all sums to the accumulators, eagerly; without ``reduce``, drops them.

        ``reduce`` takes the [K][N] sums.
        """
        steps = self._inner.gradient_accumulation_steps
        if reduce is None or int(counter_of(self._inner)) % steps == 0:
            self._zero(self._sums)
        else:
            self._move(self._sums, self._variables, reduce)

    def _move(
        self,
        sums: Sequence[Sequence[tf.Variable]],
        variables: Sequence[Any],
        reduce: Reduce,
    ) -> None:
        rows = reduce([list(map(_read, own)) for own in sums], variables)
        slots = self._place.accumulators(variables)
        rows = [*rows] * (len(slots) if len(rows) == 1 else 1)
        for row, own in zip(rows, slots, strict=True):
            for total, slot in zip(row, own, strict=True):
                if slot is not None and total is not None:
                    with tf.device(slot.device):
                        slot.assign_add(tf.cast(total, slot.dtype))
        self._zero(sums)

    @staticmethod
    def _zero(sums: Sequence[Sequence[tf.Variable]]) -> None:
        for own in filter(None, sums):
            with tf.device(own[0].device):
                clear_sums(own)

    def _clear(
        self, held: Sequence[Sequence[tf.Variable]], is_update: tf.Tensor
    ) -> None:
        """Drops other variables' sums with an update, as Keras zeroes all."""
        known = {id(total) for own in held for total in own}
        for total in (total for own in self._sums for total in own):
            if id(total) not in known:
                with tf.device(total.device):
                    value = total.read_value()
                    total.assign(tf.where(is_update, tf.zeros_like(value), value))

    def _are_finite(self, shares: Rows) -> tf.Tensor | None:
        """Returns whether all shares are finite; None if nobody asks."""
        if inner_of(self._optimizer) is self._optimizer:
            return None
        found = []
        for share in (share for own in shares for share in own):
            with tf.device(share.device):
                found.append(tf.reduce_all(tf.math.is_finite(share)))
        return self._all_true(tf.reduce_all(tf.stack(found)))


def _read(total: tf.Variable) -> tf.Tensor:
    # On its device, which the value would otherwise leave; the scope is for timelines.
    with tf.device(total.device), tf.name_scope("accumulate"):
        return total.read_value()


def _spec_of_sum(variable: Any) -> tf.TensorSpec:
    dtype = tf.as_dtype(variable.dtype)
    return tf.TensorSpec(variable.shape, tf.float32 if dtype.name in NARROW else dtype)


def _filled(variable: Any, value: tf.Tensor) -> Any:
    if variable is None:
        return None
    own = tf_variable(variable)
    with tf.device(own.device):
        return tf.fill(own.shape, tf.cast(value, own.dtype))

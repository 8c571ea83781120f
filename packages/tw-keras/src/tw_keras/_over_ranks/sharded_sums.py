"""A rank's accumulated gradients of whole variables, for an optimizer in shards.

Its towers' gradients are added on tower 0. When an update is due, a reduce-scatter
moves them to Keras's accumulators, which are in shards; in all other steps the
optimizer receives zeros, so that it counts.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_builders.internal import RankShards
from tw_core import Tower
from tw_core.internal import tf_variable, weigh
from tw_keras import _batches
from tw_keras._updates.accumulation import (
    Told,
    inner_of,
    is_update_due,
    scale_of,
    zeros_for,
)


class ShardedSums:
    """The sums of one rank, for each optimizer that accumulates."""

    def __init__(self, tower: Tower) -> None:
        """Takes the tower that holds them."""
        self._tower, self._device = tower, tower.device
        self._made: dict[int, tuple[RankShards, list[tf.Variable]]] = {}

    def forget(self) -> None:
        """Frees the sums of older optimizers."""
        self._made.clear()

    def collect(
        self,
        shards: RankShards,
        parts: Sequence[tuple[int, tf.Tensor]],
        told: Told,
        at_once: tf.Variable,
        name: str,
    ) -> tuple[list[Any], tf.Tensor]:
        """Accumulates this rank's sums over towers, ``parts``, by place.

        Returns the optimizer's gradients, by shard, and whether it updates.
        """
        sums, inner = self._of(shards), inner_of(shards.optimizer)
        places = [place for place, _ in parts]
        counts = tf.logical_and(told.has_batch, told.is_finite)
        with _batches.after([part for _, part in parts]):
            is_update = tf.logical_and(counts, is_update_due(inner))
            is_due = tf.logical_or(is_update, tf.logical_and(counts, at_once))
            divisor = tf.cast(told.divisor, tf.float64) * scale_of(shards.optimizer)
            factor = tf.math.divide_no_nan(tf.ones([], tf.float64), divisor)
        with tf.device(self._device):
            for place, part in parts:
                more = weigh(part, factor)
                sums[place].assign_add(tf.where(counts, more, tf.zeros_like(more)))

        def reduce() -> tf.Tensor:
            self._reduce(shards, places, name)
            return tf.constant(True)

        is_reduced = tf.cond(is_due, reduce, lambda: tf.constant(False))
        for place in set(range(len(sums))) - set(places):  # as Keras zeroes all
            own = sums[place].read_value()
            sums[place].assign(tf.where(is_update, tf.zeros_like(own), own))
        with tf.control_dependencies([is_reduced]):  # before the update's exchanges
            fill = tf.where(told.is_finite, tf.zeros([], tf.float64), float("nan"))
        return [
            tf.fill(own.shape, tf.cast(fill, tf_variable(own).dtype))
            if shard.variable in places
            else None
            for shard, own in zip(shards.own, shards.variables, strict=False)
        ], is_update

    def settle(self, *, over_ranks: bool) -> None:
        """Moves all sums to Keras's accumulators; not over ranks, drops them."""
        for shards, sums in self._made.values():
            inner = inner_of(shards.optimizer)
            is_left = int(inner._iterations) % inner.gradient_accumulation_steps
            if over_ranks and is_left:
                self._reduce(shards, range(len(sums)), "accumulated")
            for total in sums:
                total.assign(tf.zeros_like(total))

    def _reduce(self, shards: RankShards, places: Sequence[int], name: str) -> None:
        sums, inner = self._of(shards), inner_of(shards.optimizer)
        whole: list[Any] = [None] * len(sums)
        for place in places:
            whole[place] = sums[place].read_value()
        reduced, _ = shards.reduce(whole, name=f"accumulated, {name}")
        accumulators = inner._accumulated_gradients
        for grad, slot in zip(reduced, accumulators, strict=False):
            if grad is not None:
                own = tf_variable(slot)
                with tf.device(own.device):
                    own.assign_add(tf.cast(grad, own.dtype))
        for place in places:
            with tf.device(self._device):
                sums[place].assign(tf.zeros_like(sums[place]))

    def _of(self, shards: RankShards) -> list[tf.Variable]:
        if id(shards) not in self._made:
            with tf.init_scope():
                made = [zeros_for(own, self._tower) for own in shards.columns[0]]
            self._made[id(shards)] = shards, made
        return self._made[id(shards)][1]

"""Updates by optimizers that accumulate: towers add locally, and reduce when due."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tw_builders.internal import RankShards, owned
from tw_core.internal import weigh
from tw_keras._copies import Copies
from tw_keras._meetings.losses import scales_losses
from tw_keras._meetings.step import Step
from tw_keras._over_ranks.exchanges import (
    AccumulatedExchange,
    AccumulatedShardsExchange,
    for_towers,
    make_parts,
    to_travel,
)
from tw_keras._updates.accumulation import Sums, Told, accumulates, keeps_dtype
from tw_keras._updates.update import Brought, divisor_of, places_of_gradients
from tw_reduce import Reducer


def may_accumulate(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Returns whether towers accumulate gradients in an optimizer's place."""
    # Their sum times a scale may overflow where one gradient does not.
    is_narrow = scales_losses(optimizer) and not keeps_dtype(variables)
    overwrite = any(getattr(v, "overwrite_with_gradient", False) for v in variables)
    return accumulates(optimizer) and not (is_narrow or overwrite)


def accumulate(
    step: Step,
    place: int,
    optimizer: Any,
    brought: Sequence[Brought],
    weights: Sequence[Any] | None,
    *,
    averages: bool,
) -> list[Brought]:
    """Accumulates gradients in each tower; returns [K] to apply, zeros if not due."""
    used = places_of_gradients(brought)
    parts = _parts(step, brought, used, weights)
    exchange = AccumulatedExchange(place, brought, used, averages)
    told = _told(optimizer, parts, divisor_of(brought, weights, averages=averages))
    return _collect(step, optimizer, exchange, parts, told)


def accumulate_for_shards(
    step: Step,
    place: int,
    shards: RankShards,
    brought: Sequence[Brought],
    weights: Sequence[Any] | None,
    *,
    averages: bool,
) -> tuple[AccumulatedShardsExchange, list[Any]]:
    """Accumulates this rank's gradients; returns its shards', and if they update.

    These are zeros: Keras's accumulators have the real ones.
    """
    used = places_of_gradients(brought)
    parts = _parts(step, brought, used, weights)
    exchange = AccumulatedShardsExchange(place, brought, used, averages, shards)
    total = divisor_of(brought, weights, averages=averages)
    told = _told(shards.optimizer, parts, total)
    added = cast(Reducer, step.reducer)(parts)[0]
    return exchange, _collect_for_shards(step, exchange, added, told)


def collect_none_for_shards(
    step: Step, exchange: AccumulatedShardsExchange
) -> list[Any]:
    """Takes part in an update by other ranks, as ``accumulate_for_shards`` does."""
    told = Told(0, tf.constant(False), tf.constant(True))
    return _collect_for_shards(step, exchange, make_parts(exchange)[0], told)


def _collect_for_shards(
    step: Step,
    exchange: AccumulatedShardsExchange,
    added: Sequence[tf.Tensor],
    told: Told,
) -> list[Any]:
    copies: Any = step.copies
    told = step.ranks.in_steps.tell(exchange, told, step.checksum)
    parts = list(zip(exchange.places, added, strict=True))
    with tf.name_scope("accumulate"):  # for timelines
        grads, is_update = copies.sharded.sums.collect(
            *(exchange.shards, parts, told, copies.accumulation.at_once),
            name=f"update {exchange.place}",
        )
    return [*grads, is_update]


def _parts(
    step: Step,
    brought: Sequence[Brought],
    used: Sequence[int],
    weights: Sequence[Any] | None,
) -> list[list[tf.Tensor]]:
    parts = []
    for k, own in enumerate(brought):
        with tf.device(step.copies.towers[k].device):
            grads = [_dense(own.grads[m], own.variables[m]) for m in used]
            if weights is not None:
                grads = [weigh(grad, weights[k]) for grad in grads]
            parts.append(grads)
    return parts


def _told(optimizer: Any, parts: Sequence[Sequence[tf.Tensor]], total: Any) -> Told:
    is_finite = tf.constant(True)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        is_finite = _are_finite(parts)
    return Told(total, tf.constant(True), is_finite)


def collect_none(
    step: Step, optimizer: Any, exchange: AccumulatedExchange
) -> list[Brought]:
    """Takes part in other ranks' update, with this rank's accumulated gradients."""
    told = Told(0, tf.constant(False), tf.constant(True))
    return _collect(step, optimizer, exchange, make_parts(exchange), told)


def _collect(
    step: Step,
    optimizer: Any,
    exchange: AccumulatedExchange,
    parts: Sequence[Sequence[tf.Tensor]],
    told: Told,
) -> list[Brought]:
    copies, ranks = step.copies, step.ranks
    if not optimizer.built:
        copies.build_optimizer(optimizer, exchange.brought[0].variables)
    if ranks is not None:
        told = ranks.in_steps.tell(exchange, told, step.checksum)
    homes = _homes(copies, optimizer, exchange)
    add = cast(Reducer, step.reducer)

    def reduce(sums: Sums) -> Sequence[Sequence[Any]]:
        if copies.memory is not None:
            if ranks is not None:
                ranks.in_steps.begin_sums(exchange.place)
            holder = copies.memory.of(exchange.place, optimizer)
            rows = holder.of(exchange.variables)(
                sums if ranks is None else [add(sums)[0]]
            )
            rows *= len(sums) // len(rows)
        elif ranks is not None:
            rows = [ranks.in_steps.sum_accumulated(exchange, add(sums)[0])] * len(sums)
        elif copies.variables == "replicated":
            return add(sums)
        else:
            rows = [_added(sums, homes, copies)] * len(sums)
        return [
            [own if k in at else None for own, at in zip(row, homes, strict=True)]
            for k, row in enumerate(rows)
        ]

    with tf.name_scope("accumulate"):  # for timelines
        grads = copies.accumulation.collect(
            optimizer, exchange.variables, parts, told, reduce
        )
    rows = [
        [grads[k if k in at else at[0]][m] for m, at in enumerate(homes)]
        for k in range(len(exchange.brought))
    ]
    return for_towers(rows, exchange)


def _homes(
    copies: Copies, optimizer: Any, exchange: AccumulatedExchange
) -> list[Sequence[int]]:
    """Lists for each gradient the towers that apply it."""
    every = range(len(exchange.brought))
    if copies.variables != "sharded" or len(every) == 1:
        at = every if copies.variables == "replicated" else range(1)
        return [at] * len(exchange.used)
    columns = [own.variables for own in exchange.brought]
    owners = owned(columns, optimizer)
    return [[k for k in every if columns[k][m] is owners[m]] for m in exchange.used]


def _added(sums: Sums, homes: Sequence[Any], copies: Copies) -> list[tf.Tensor]:
    """Adds towers' sums where they are applied."""
    totals = []
    for column, at in zip(zip(*sums, strict=True), homes, strict=True):
        with tf.device(copies.towers[at[0]].device):
            totals.append(tf.add_n(column))
    return totals


def _dense(grad: Any, variable: Any) -> tf.Tensor:
    """Returns a gradient as Keras adds it to its accumulators."""
    if grad is None:
        grad = tf.zeros(variable.shape, tf.as_dtype(variable.dtype))
    return to_travel(grad, variable, True)


def _are_finite(parts: Sequence[Sequence[tf.Tensor]]) -> tf.Tensor:
    found = []
    for part in (part for own in parts for part in own):
        with tf.device(part.device):
            found.append(tf.reduce_all(tf.math.is_finite(part)))
    return tf.reduce_all(tf.stack(found))

"""Updates by a reducer with memory, from towers' or ranks' shares of the mean."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import map_values, weigh
from tw_keras._meetings.step import Step
from tw_keras._over_ranks.exchanges import RememberedExchange, for_towers, to_travel
from tw_keras._updates.accumulation import Told, scale_of
from tw_keras._updates.update import Brought, divisor_of, places_of_gradients


def reduce_remembering(
    step: Step,
    place: int,
    optimizer: Any,
    brought: Sequence[Brought],
    weights: Sequence[Any] | None,
    *,
    averages: bool,
) -> list[Brought]:
    """Reduces gradients, and keeps the unsent remainder; returns [K] to apply."""
    used = places_of_gradients(brought)
    total = divisor_of(brought, weights, averages=averages)
    parts = [
        [_prepared(own.grads[m], own.variables[m], m in own.same_rows) for m in used]
        for own in brought
    ]
    exchange = RememberedExchange(place, brought, used, averages)
    told = Told(total, tf.constant(True), tf.constant(True))
    return _reduce(step, optimizer, exchange, parts, told, weights)


def send_none(
    step: Step, optimizer: Any, exchange: RememberedExchange
) -> list[Brought]:
    """Takes part in other ranks' update, with this rank's memory."""
    told = Told(0, tf.constant(False), tf.constant(True))
    parts = [
        [_none_of(own.grads[m], own.variables[m]) for m in exchange.used]
        for own in exchange.brought
    ]
    return _reduce(step, optimizer, exchange, parts, told, None)


def _reduce(
    step: Step,
    optimizer: Any,
    exchange: RememberedExchange,
    parts: Sequence[Sequence[Any]],
    told: Told,
    weights: Sequence[Any] | None,
) -> list[Brought]:
    copies, ranks = step.copies, step.ranks
    if not optimizer.built:
        copies.build_optimizer(optimizer, exchange.brought[0].variables)
    if ranks is not None:
        told = ranks.in_steps.tell(exchange, told, step.checksum)
    with tf.device("/cpu:0"):
        scale = scale_of(optimizer)
        divisor = tf.cast(told.divisor, tf.float64) * scale
        factor = tf.math.divide_no_nan(tf.ones([], tf.float64), divisor)
    shares = []
    for k, own in enumerate(parts):
        with tf.device(copies.towers[k].device):
            by = factor
            if weights is not None:
                by *= tf.cast(weights[k], tf.float64)
            shares.append([weigh(part, by) for part in own])
    if ranks is not None:
        shares = [copies.add(shares)[0]]
        ranks.in_steps.begin_sums(exchange.place)
    memory: Any = copies.memory
    holder = memory.of(exchange.place, optimizer)
    sums = holder.of(exchange.variables)(shares, if_=told.has_batch)
    scaled = [[map_values(_times(scale), total) for total in own] for own in sums]
    return for_towers(scaled, exchange)


def _times(scale: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    def multiply(values: tf.Tensor) -> tf.Tensor:
        with tf.device(values.device):
            return values * tf.cast(scale, values.dtype)

    return multiply


def _prepared(grad: Any, variable: Any, has_same_rows: bool) -> Any:
    if grad is None:
        grad = tf.zeros(variable.shape, tf.as_dtype(variable.dtype))
    return to_travel(grad, variable, has_same_rows)


def _none_of(grad: Any, variable: Any) -> Any:
    """Returns a variable's zero gradient on a rank without a batch."""
    dtype = tf.as_dtype(variable.dtype)
    if isinstance(grad, tf.IndexedSlices):
        grad = tf.IndexedSlices(
            tf.zeros([0, *variable.shape[1:]], dtype), tf.zeros([0], grad.indices.dtype)
        )
        return to_travel(grad, variable, False)
    return _prepared(None, variable, False)

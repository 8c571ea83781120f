"""Updates over ranks by an optimizer over towers that accumulates.

It accumulates every micro-batch of its own rank, as shares of the mean over all ranks;
these exchange the accumulated gradients when an update is due.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import weigh
from tw_keras._meetings.step import Step
from tw_keras._over_ranks.exchanges import OverTowersExchange, make_parts, to_travel
from tw_keras._over_ranks.in_steps import InSteps
from tw_keras._over_ranks.sharded import ApartGroup
from tw_keras._updates.accumulation import Told
from tw_keras._updates.update import Brought, places_of_gradients


class SendingGroup(ApartGroup):
    """A step's group, which matches the n-th sum of each rank with the others'."""

    def __init__(self, in_steps: InSteps, place: int) -> None:
        """Starts to count the sums of an update."""
        super().__init__(in_steps)
        self._place = place
        in_steps.begin_sums(place)

    def sum(self, tensors: Sequence[Any], *, names: Sequence[str] = ()) -> list[Any]:
        """Adds tensors, dense or sparse, over the ranks."""
        return self._in_steps.sum_remembered(self._place, tensors)


def shares_of_mean(
    step: Step, place: int, brought: Sequence[Brought], weights: Sequence[Any] | None
) -> tuple[list[Brought], Any]:
    """Returns gradients whose mean over towers and ranks is that over all rows.

    ``weights``: None if gradients are weighted already. Also returns the micro-batch's
    weight over all ranks; None if losses are added.
    """
    used, own_weights = places_of_gradients(brought), step.weights
    exchange = OverTowersExchange(place, brought, used, own_weights is not None)
    total = 0 if own_weights is None else tf.add_n(_wide(own_weights))
    weight = _tell(step, exchange, Told(total))
    shares = []
    for k, (own, tower) in enumerate(zip(brought, step.copies.towers, strict=False)):
        factor = tf.constant(len(brought) * step.ranks.group.size, tf.float64)
        if weights is not None:
            factor *= tf.math.divide_no_nan(_wide(weights)[k], weight)
        grads: list[Any] = [None] * len(own.grads)
        with tf.device(tower.device):
            for n in used:
                grad, has_same_rows = own.grads[n], n in own.same_rows
                if grad is not None:
                    grad = to_travel(grad, own.variables[n], has_same_rows)
                    grads[n] = weigh(grad, factor)
        shares.append(Brought(grads, own.variables))
    return shares, None if own_weights is None else weight


def tell_of_none(step: Step, exchange: OverTowersExchange) -> Any:
    """Learns the weight of a micro-batch of which this rank has no rows."""
    return _tell(step, exchange, Told(0, tf.constant(False)))


def none_of(exchange: OverTowersExchange) -> list[Brought]:
    """Returns the zero gradients of this rank's towers."""
    grads: list[Any] = [None] * len(exchange.brought[0].variables)
    for n, zeros in zip(exchange.used, make_parts(exchange)[0], strict=True):
        grads[n] = zeros
    return [Brought(grads, own.variables) for own in exchange.brought]


def _tell(step: Step, exchange: OverTowersExchange, told: Told) -> Any:
    told = step.ranks.in_steps.tell(exchange, told, step.checksum)
    return tf.cast(told.divisor, tf.float64)


def _wide(weights: Sequence[Any]) -> list[Any]:
    return [tf.cast(own, tf.float64) for own in weights]

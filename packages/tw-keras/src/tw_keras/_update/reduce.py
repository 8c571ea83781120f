"""Sums of gradients: over this rank's towers, then over the ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import tensorflow as tf

from tw_core import Tower
from tw_core.internal import (
    Gradients,
    ensured,
    gradients_of_one_trace,
    tf_variables,
)
from tw_keras._update.gradients import Rows, name_of
from tw_keras._update.in_shards import InShards
from tw_reduce import Reducer, ReducerState, mean
from tw_reduce.internal import add_on_device, means_of, sum_at_homes, sum_for_all

Stage = Callable[[Rows, Sequence[Any]], Rows]
Averaging = Callable[..., Rows]  # a stage that takes ``averages``, whether it divides


class Ranks(Protocol):
    """The exchanges of a step; ``_over_ranks.exchanges`` has them."""

    manner: dict[str, Any]

    def sum(
        self, what: str, tensors: Sequence[Any], names: Sequence[str] = (), **how: Any
    ) -> list[Any]:
        """Adds tensors over the ranks."""


def over_towers(
    towers: Sequence[Tower], reducer: Reducer | None, *, keeps_one: bool
) -> Averaging:
    """Returns the sum over towers: [K][M] for all, or [1][M] if it ``keeps_one``.

    ``reducer``: the one to use, even for one tower; None for a sum.
    """
    devices = [tower.device for tower in towers]
    # If ranks add them next, towers need no copies of their sums.
    on_first: Any = partial(add_on_device, device=devices[0])
    add = reducer or (on_first if keeps_one else sum_for_all(devices))
    divided = mean if reducer else means_of

    def reduce(rows: Rows, variables: Sequence[Any], *, averages: bool = False) -> Rows:
        if reducer is None and len(rows) == 1:
            return rows
        grads = rows if reducer else gradients_of_one_trace(rows)
        sums = (divided(add) if averages else add)(grads)
        return sums[:1] if keeps_one else sums

    return reduce


def where_applied(targets: Callable[[Sequence[Any]], Rows]) -> Averaging:
    """Returns the sum over towers on the devices of the updated variables, [1][M]."""

    def reduce(rows: Rows, variables: Sequence[Any], *, averages: bool = False) -> Rows:
        if len(rows) == 1:
            return rows
        own = tf_variables(targets(variables)[0])
        grads = Gradients(ensured(row, own, tower=k) for k, row in enumerate(rows))
        around = means_of if averages else lambda reducer: reducer
        return [sum_at_homes([v.device for v in own], grads, around)]

    return reduce


def over_ranks(ranks: Ranks, what: str) -> Stage:
    """Returns the sum over ranks, which all get: [1][M] of [1][M]."""

    def exchange(rows: Rows, variables: Sequence[Any]) -> Rows:
        names = list(map(name_of, variables))
        return [ranks.sum(what, rows[0], names, **ranks.manner)]

    return exchange


def remembering(
    memory: Callable[[], ReducerState], num_towers: int, shards: InShards | None
) -> Stage:
    """Returns a reducer with memory, which has its own sum of what is sent.

    Where tower 0 has all rows, other towers send what they remember.
    """

    def reduce(rows: Rows, variables: Sequence[Any]) -> Rows:
        none = [_none_like(grad) for grad in rows[0]]
        rows = [*rows, *[none] * (num_towers - len(rows))]
        sums: Rows = memory().of(variables)(rows)
        return sums if shards is None else [shards.cut(variables, sums[0])]

    return reduce


def _none_like(grad: Any) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values[:0], grad.indices[:0], grad.dense_shape)
    return tf.zeros_like(grad)


def to_shards(what: str, place: InShards) -> Stage:
    """Returns the sum over ranks of what each has shards of: [1][S] of [1][M]."""

    def exchange(rows: Rows, variables: Sequence[Any]) -> Rows:
        shards = place.shards
        reduced = shards.reduce(place.whole(variables, rows[0]), name=what)
        return [shards.divided(reduced)]

    return exchange

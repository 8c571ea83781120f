"""An update: the gradients that towers pass to it, and its settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core import Tower
from tw_core.internal import map_flat, weigh, weight_dtype
from tw_reduce import Reducer


@dataclass(frozen=True)
class Brought:
    """A tower's arguments to its optimizer's ``apply``: [N] each, gradients or None.

    ``same_rows``: places of sparse gradients for the same rows in every tower.
    """

    grads: Sequence[Any]
    variables: Sequence[Any]
    same_rows: Sequence[int] = ()


@dataclass(frozen=True)
class Update:
    """One update by all towers."""

    towers: Sequence[Tower]
    optimizer: Any  # tower 0's
    states: Callable[[Any, Sequence[Any]], Sequence[Any]]  # the towers', made if needed
    weights: Sequence[Any] | None  # [K]; None for equal ones
    average: bool
    reducer: Reducer | None
    is_reduced: bool = False  # gradients are equal in all towers
    compiled_by_xla: bool = False
    group: Any = None  # of ranks, for an optimizer over towers that accumulates


def places_of_gradients(brought: Sequence[Brought]) -> list[int]:
    """Lists the places of variables that have a gradient in any tower."""
    return [
        n
        for n in range(len(brought[0].grads))
        if any(own.grads[n] is not None for own in brought)
    ]


def places_of_records(own: Brought) -> list[int]:
    """Lists the places of records, such as float8 layers' largest inputs.

    Keras overwrites them with their gradients.
    """
    return [
        n
        for n, variable in enumerate(own.variables)
        if getattr(variable, "overwrite_with_gradient", False)
        and own.grads[n] is not None
    ]


def with_records(
    brought: Sequence[Brought], records: Mapping[int, tf.Tensor], divisor: Any
) -> list[Brought]:
    """Gives all towers the same records, by place, divided for their sum."""
    shares = {n: value / divisor for n, value in records.items()}
    return [
        replace(own, grads=[shares.get(n, grad) for n, grad in enumerate(own.grads)])
        for own in brought
    ]


def divisor_of(
    brought: Sequence[Brought], weights: Sequence[Any] | None, *, averages: bool
) -> Any:
    """Returns the divisor of the sum of a rank's weighted gradients."""
    if weights is None:
        return len(brought) if averages else 1
    return tf.add_n([tf.cast(own, tf.float64) for own in weights])


def with_gradients(brought: Sequence[Brought]) -> list[Brought]:
    """Drops the variables without a gradient in any tower, as Keras does."""
    used = places_of_gradients(brought)
    return [
        Brought([own.grads[n] for n in used], [own.variables[n] for n in used])
        for own in brought
    ]


def times(brought: Sequence[Brought], factors: Sequence[Any]) -> list[Brought]:
    """Multiplies each tower's gradients by its factor."""

    def weighed(grads: Sequence[Any], factor: Any) -> list[Any]:
        wide = weight_dtype(grad for grad in grads if grad is not None)
        by = partial(weigh, weight=tf.cast(factor, wide))
        dense = iter(map_flat(by, [g for g in grads if isinstance(g, tf.Tensor)]))
        return [next(dense) if isinstance(g, tf.Tensor) else g and by(g) for g in grads]

    return [
        Brought(weighed(own.grads, factor), own.variables, own.same_rows)
        for own, factor in zip(brought, factors, strict=True)
    ]


def with_rows_added(
    brought: Sequence[Brought], weights: Sequence[Any] | None
) -> Sequence[Brought]:
    """Adds sparse gradients for the same rows; one tower gets the sum.

    For example, a table of relative positions is read at the same places in every
    tower, some of them twice. Without this, the rows would repeat more often than on
    one device: only rows known to be unique are added otherwise.
    """
    if not brought[0].same_rows:
        return brought
    grads = [list(own.grads) for own in brought]
    for n in brought[0].same_rows:
        column = [own[n] for own in grads]
        for own, grad in zip(grads, _carried(column, weights), strict=True):
            own[n] = grad
    return [
        Brought(more, own.variables) for more, own in zip(grads, brought, strict=True)
    ]


def _carried(
    column: Sequence[tf.IndexedSlices], weights: Sequence[Any] | None
) -> list[tf.IndexedSlices]:
    """Returns [K] gradients; only the tower with the largest weight has rows."""
    values = [grad.values for grad in column]
    if weights is None:
        carrier = tf.constant(0, tf.int64)
    else:
        shares = tf.stack([tf.cast(weight, tf.float64) for weight in weights])
        carrier = tf.argmax(shares)
        shares /= tf.reduce_max(shares)
        pairs = zip(values, tf.unstack(shares), strict=True)
        values = [weigh(own, share) for own, share in pairs]
    total = tf.add_n(values)
    carried = []
    for k, grad in enumerate(column):
        rows = tf.where(carrier == k, tf.shape(grad.indices)[0], 0)
        carried.append(
            tf.IndexedSlices(total[:rows], grad.indices[:rows], grad.dense_shape)
        )
    return carried

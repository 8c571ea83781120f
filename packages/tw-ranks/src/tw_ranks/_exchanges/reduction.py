r"""Gradients of all towers of all ranks, summed or averaged.

    tower 0  tower 1          tower 0  tower 1
       \       /                \       /
       sum_towers               sum_towers       on every rank by itself
           |                        |
         join                     join           one flat tensor per dtype, with the
           |                        |            weight of the rank at its end
           +------- all-reduce -----+            a ring; in a narrow type: exchange,
           |                        |            then add in float32
          cut                      cut
       /       \                /       \
    tower 0  tower 1          tower 0  tower 1

The fixed cost of a collective is that of a few hundred kilobytes, so all small tensors
are sent in one, with the gradients of the last layers, which are ready first, in front.
A tensor of two mebibytes or more is sent alone: joining and cutting would copy it
twice.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from tw_core.internal import (
    Gradients,
    add_rows,
    check_function,
    check_gradients,
    check_weight,
    check_weights,
    map_values,
    plan_buckets,
    scalar_of,
    values_of,
    weigh,
    weight_dtype,
    without_autograph,
)
from tw_ranks._endpoint.endpoint import Endpoint
from tw_ranks._exchanges.collectives import NARROW, check_dtypes
from tw_ranks._exchanges.gradients import Manner, exchange_gradients, narrow_dtype

Grads = Sequence[Sequence[Any]]
"""[K][N]: ``grads[k][n]`` is tower k's gradient for variable n."""

SumTowers = Callable[[Any], Any]

_FLOATS = ("float32", "float64", *NARROW)
_WHOLE = ("int32", "int64")
_WIRE_DTYPES = (None, *NARROW)


@without_autograph
def sum_over_ranks(
    grads: Grads,
    endpoint: Endpoint,
    *,
    sum_towers: SumTowers | None = None,
    wire_dtype: Any = None,
    names: Sequence[str] = (),
) -> list[list[Any]]:
    """Adds the gradients of all towers of all ranks; see ``sum_across``."""
    wire = _check(grads, sum_towers, wire_dtype, names)
    local = _add_towers(grads, sum_towers, (*_FLOATS, *_WHOLE))
    reduced = _in_buckets(local, None, endpoint, names, Manner(wire))
    return [[grad for grad, _ in reduced] for _ in grads]


@without_autograph
def mean_over_ranks(
    grads: Grads,
    endpoint: Endpoint,
    *,
    weight: Any,
    weights: Sequence[Any] | None = None,
    sum_towers: SumTowers | None,
    wire_dtype: Any,
    names: Sequence[str],
    divides_towers: bool = True,
) -> list[list[Any]]:
    """Averages the gradients of all ranks; see ``mean_across`` and ``mean_of_ranks``.

    A rank's gradients are multiplied by its weight, and the sum is divided by the sum
    of all weights. But narrow gradients, added in float32 after sending, are weighted
    there, which yields their mean: weighted before, they might overflow.
    """
    wire = _check(grads, sum_towers, wire_dtype, names)
    if weight is not None and weights is not None:
        raise ValueError(
            "pass weight or weights, not both: the weight of a rank is the sum of its "
            "towers' weights."
        )
    if weight is not None:
        check_weight(weight)
    check_weights(weights, num_towers=len(grads))
    are_narrow = [narrow_dtype(grad.dtype, wire) is not None for grad in grads[0]]
    if weights is not None:
        grads, weight = _weigh_towers(grads, weights, are_narrow)
        local = _add_towers(grads, sum_towers, _FLOATS)
    else:
        local = _add_towers(grads, sum_towers, _FLOATS)
        part = 1.0 / len(grads) if divides_towers else 1.0
        local = _weigh_rank(local, weight, part, are_narrow)
    manner = Manner(wire, divides=weight is None, weighs=weight is not None)
    reduced = _in_buckets(local, weight, endpoint, names, manner)
    means = [
        grad if is_narrow or weight is None else _divide(grad, total)
        for (grad, total), is_narrow in zip(reduced, are_narrow, strict=True)
    ]
    return [list(means) for _ in grads]


def _in_buckets(
    local: Sequence[Any],
    weight: Any,
    endpoint: Endpoint,
    names: Sequence[str],
    manner: Manner,
) -> list[tuple[Any, tf.Tensor]]:
    """Returns [N] sums or means over the ranks, each with the weight of all ranks.

    A bucket is sent as soon as its gradients are computed.
    """
    known = [own.shape.num_elements() or 0 for own in map(values_of, local)]
    sizes = [[n * values_of(g).dtype.size] for n, g in zip(known, local, strict=True)]
    found: dict[int, tuple[Any, tf.Tensor]] = {}
    for number, places in enumerate(plan_buckets(sizes, endpoint.bucket_bytes)):
        own = [local[n] for n in places]
        brought = _as_brought(1.0 if weight is None else weight, own)
        of_bucket = [names[n] for n in places] if names else ()
        with tf.name_scope(f"bucket_{number}") if number else nullcontext():
            reduced, total = exchange_gradients(
                own, brought, endpoint, of_bucket, manner
            )
        found |= {n: (grad, total[0]) for n, grad in zip(places, reduced, strict=True)}
    return [found[n] for n in range(len(local))]


def _check(
    grads: Grads,
    sum_towers: SumTowers | None,
    wire_dtype: Any,
    names: Sequence[str],
) -> str | None:
    if not isinstance(grads, Gradients):
        check_gradients(grads)
    if not grads[0]:
        raise ValueError("grads must hold at least one gradient.")
    if sum_towers is not None:
        check_function(sum_towers=sum_towers)
    if names and len(names) != len(grads[0]):
        raise ValueError(
            f"names must hold one per gradient; got {len(names)} for {len(grads[0])}."
        )
    wire = None if wire_dtype is None else tf.as_dtype(wire_dtype).name
    if wire not in _WIRE_DTYPES:
        raise ValueError(
            f"wire_dtype must be one of {_WIRE_DTYPES}; got {wire_dtype!r}."
        )
    return wire


def _weigh_towers(
    grads: Grads, weights: Sequence[Any], are_narrow: Sequence[bool]
) -> tuple[Grads, tf.Tensor]:
    """Weights each tower's gradients; returns them and the weight of the rank.

    Narrow ones are multiplied by the tower's share, and become this rank's mean.
    """
    own = [scalar_of(of_tower, weight_dtype(grads[0])) for of_tower in weights]
    weight = tf.add_n(own)
    shares = [tf.math.divide_no_nan(of_tower, weight) for of_tower in own]
    weighed = [
        [
            weigh(grad, share if is_narrow else of_tower)
            for grad, is_narrow in zip(tower, are_narrow, strict=True)
        ]
        for tower, share, of_tower in zip(grads, shares, own, strict=True)
    ]
    return weighed, weight


def _weigh_rank(
    local: Sequence[Any], weight: Any, part: float, are_narrow: Sequence[bool]
) -> list[Any]:
    """Multiplies gradients by ``part``, and those not narrow by the rank's weight."""
    if weight is not None:
        rounded = scalar_of(weight, weight_dtype(local))  # as it is added over ranks
        weight = tf.cast(rounded, tf.float64) * part
    factors = [
        part if weight is None or is_narrow else weight for is_narrow in are_narrow
    ]
    return [
        grad if isinstance(factor, float) and factor == 1.0 else weigh(grad, factor)
        for grad, factor in zip(local, factors, strict=True)
    ]


def _add_towers(
    grads: Grads, sum_towers: SumTowers | None, known: Sequence[str]
) -> list[Any]:
    """Adds gradients over the towers, by default each on the device of tower 0's."""
    if sum_towers is not None:
        sums = list(sum_towers(grads)[0])
    elif len(grads) == 1:
        sums = list(grads[0])
    else:
        sums = [_add_column(column) for column in zip(*grads, strict=True)]
    check_dtypes(sums, known)
    return sums


def _add_column(column: Sequence[Any]) -> Any:
    sparse = [grad for grad in column if isinstance(grad, tf.IndexedSlices)]
    dense = [grad for grad in column if not isinstance(grad, tf.IndexedSlices)]
    with tf.device(values_of(column[0]).device):
        if not dense:
            return add_rows(sparse)
        total = tf.add_n(dense)
        for grad in sparse:
            places = grad.indices[:, tf.newaxis]
            total = tf.tensor_scatter_nd_add(total, places, grad.values)
        return total


def _as_brought(weight: Any, grads: Sequence[Any]) -> tf.Tensor:
    """Returns a rank's weight as it is sent; -0.0 means that a rank is done."""
    return tf.abs(tf.reshape(scalar_of(weight, weight_dtype(grads)), [1]))


def _divide(grad: Any, weight: tf.Tensor) -> Any:
    def divide(values: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(values, tf.cast(weight, values.dtype))

    return map_values(divide, grad)

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
travel in one, with the gradients of the last layers, which are ready first, in front. A
tensor of two mebibytes or more travels alone: joining and cutting would copy it twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core.checks import check_function
from tw_core.gradients import (
    Gradients,
    add_rows,
    check_gradients,
    check_weight,
    check_weights,
    map_values,
    values_of,
    weigh,
)
from tw_core.modes import without_autograph
from tw_ranks._collectives import check_dtypes
from tw_ranks._gradient_exchange import NARROW, exchange_gradients, narrow_dtype
from tw_ranks._group import ProcessGroup

Grads = Sequence[Sequence[Any]]
"""[K][N]: ``grads[k][n]`` is tower k's gradient for variable n."""

_FLOATS = ("float32", "float64", *NARROW)
_WHOLE = ("int32", "int64")
_WIRE_DTYPES = (None, *NARROW)


def sum_across(
    grads: Grads,
    *,
    group: ProcessGroup,
    sum_towers: Callable[[Any], Any] | None = None,
    wire_dtype: Any = None,
    names: Sequence[str] = (),
) -> list[list[Any]]:
    """Adds the gradients of all towers of all ranks.

    Args:
      grads: [K][N], K of this rank alone; dense or ``tf.IndexedSlices``. N, shapes
        and dtypes are the same on all ranks. Half-precision floats are added in
        float32.
      group: the ranks.
      sum_towers: [K][N] -> [K][N], adds the gradients of this rank's towers, e.g. a
        reducer of tw-reduce; by default each is added on the device of tower 0's.
      wire_dtype: "float16" or "bfloat16", in which wider floats travel; they are summed
        in float32, and the sum is rounded once more on its way back. Values of sparse
        gradients travel in it too, but are not added here; indices keep their dtype.
        None: all gradients travel in their own dtypes.
      names: [N] of the variables, for messages; ranks must agree on them.

    Returns:
      [K][N], the same bits for all towers of all ranks. Sparse gradients have the
      rows of all; rows of the same index are added up where no rank repeats them (see
      ``tw_core.gradients.has_unique_rows``), and not otherwise.

    Raises:
      ValueError: lists of unequal length, dtypes that cannot be added, or gradients
        that do not match those of another rank.
      TypeError: an argument is of another type.
      RankTimeoutError: a rank is missing (see ``ProcessGroup.bounded``).
    """
    return _reduce(grads, group, sum_towers, wire_dtype, names, weight=1.0)


def mean_across(
    grads: Grads,
    *,
    group: ProcessGroup,
    weight: Any = None,
    weights: Sequence[Any] | None = None,
    sum_towers: Callable[[Any], Any] | None = None,
    wire_dtype: Any = None,
    names: Sequence[str] = (),
) -> list[list[Any]]:
    """Averages the gradients of all towers of all ranks.

    Args:
      grads: as ``sum_across`` takes them, of floats.
      group: the ranks.
      weight: of this rank's mean over its towers, a number or scalar tensor, 0 or more,
        such as the number of rows of its batch. None: equal weights, divided by the
        number of ranks, including those that contribute nothing.
      weights: [K] of this rank's towers, such as the rows of each; in place of
        ``weight``, which is then their sum. Gradients of weight 0 are ignored, even if
        they are NaN. All ranks pass weights of either kind, or none does.
      sum_towers: as for ``sum_across``.
      wire_dtype: as for ``sum_across``.
      names: as for ``sum_across``.

    Returns:
      [K][N] means; zeros where all weights are zero.

    Raises:
      ValueError: as ``sum_across``; gradients that are not floats; a weight below 0,
        unequal numbers of weights and towers, or both arguments.
      TypeError: as ``sum_across``; a weight that is not a number or scalar tensor.
      RankTimeoutError: as ``sum_across``.
    """
    return _reduce(
        *(grads, group, sum_towers, wire_dtype, names),
        weight=weight,
        weights=weights,
        is_mean=True,
    )


def mean_of_ranks(
    grads: Grads,
    *,
    group: ProcessGroup,
    weight: Any = None,
    sum_towers: Callable[[Any], Any] | None = None,
    wire_dtype: Any = None,
    names: Sequence[str] = (),
) -> list[list[Any]]:
    """Adds the gradients of each rank's towers, and averages these sums over the ranks.

    For callers that take a reducer that adds, and divide by the number of towers: the
    builders, and the optimizers of tw-ampopt and tw-rlload, whose steps then equal
    those on all ranks' batches as one. Arguments and errors are those of
    ``mean_across``; where ``tw_reduce.mean(reducer, weights=...)`` wraps this reducer,
    ``weight`` is the sum of the towers' weights.

    Returns:
      [K][N]: K times the mean.
    """
    return _reduce(
        *(grads, group, sum_towers, wire_dtype, names),
        weight=weight,
        is_mean=True,
        divides_towers=False,
    )


@without_autograph
def _reduce(
    grads: Grads,
    group: ProcessGroup,
    sum_towers: Callable[[Any], Any] | None,
    wire_dtype: Any,
    names: Sequence[str],
    *,
    weight: Any,
    weights: Sequence[Any] | None = None,
    is_mean: bool = False,
    divides_towers: bool = True,
) -> list[list[Any]]:
    wire = _check(grads, sum_towers, wire_dtype, names)
    if weight is not None and weights is not None:
        raise ValueError(
            "weights of towers make the weight of this rank, which is their sum; pass "
            "one of both."
        )
    if weight is not None:
        check_weight(weight)
    check_weights(weights, num_towers=len(grads))
    # Narrow gradients are weighed where they are added, which yields their mean.
    narrow = [narrow_dtype(values_of(grad).dtype, wire) for grad in grads[0]]
    if weights is not None:
        own = [tf.cast(of_tower, tf.float32) for of_tower in weights]
        weight = tf.add_n(own)
        shares = [tf.math.divide_no_nan(of_tower, weight) for of_tower in own]
        grads = [
            [
                weigh(grad, factors[0] if is_narrow else factors[1])
                for grad, is_narrow in zip(tower, narrow, strict=True)
            ]
            for tower, *factors in zip(grads, shares, own, strict=True)
        ]
    local = _add_towers(grads) if sum_towers is None else list(sum_towers(grads)[0])
    known = _FLOATS if is_mean else (*_FLOATS, *_WHOLE)
    check_dtypes([values_of(grad) for grad in local], known)
    if is_mean and weights is None:
        part = 1.0 / len(grads) if divides_towers else 1.0
        share: Any = part
        if weight is not None:
            share = tf.cast(tf.cast(weight, tf.float32), tf.float64) * part
        factors = [part if is_narrow else share for is_narrow in narrow]
        local = [
            grad if factor is part and part == 1.0 else weigh(grad, factor)
            for grad, factor in zip(local, factors, strict=True)
        ]
    weighs = is_mean and weight is not None
    brought = tf.reshape(tf.cast(1.0 if weight is None else weight, tf.float32), [1])
    brought = tf.abs(brought)  # -0.0 means that a rank is done.
    reduced, total = exchange_gradients(
        local,
        brought,
        group,
        names,
        wire=wire,
        divides=is_mean and not weighs,
        weighs=weighs,
    )
    if weighs:

        def divide(values: tf.Tensor) -> tf.Tensor:
            return tf.math.divide_no_nan(values, tf.cast(total[0], values.dtype))

        reduced = [
            grad if is_narrow else map_values(divide, grad)
            for grad, is_narrow in zip(reduced, narrow, strict=True)
        ]
    return [list(reduced) for _ in grads]


def _check(
    grads: Grads,
    sum_towers: Callable[[Any], Any] | None,
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


def _add_towers(grads: Grads) -> list[Any]:
    """Adds gradients over the towers, each on the device of tower 0's."""
    if len(grads) == 1:
        return list(grads[0])
    sums = []
    for column in zip(*grads, strict=True):
        with tf.device(values_of(column[0]).device):
            if any(isinstance(g, tf.IndexedSlices) for g in column):
                sums.append(add_rows(column))
            else:
                sums.append(tf.add_n(list(column)))
    return sums

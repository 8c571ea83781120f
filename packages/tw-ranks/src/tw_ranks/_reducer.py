"""Sums and means of gradients over all towers of all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

from tw_core.internal import elementwise
from tw_ranks._exchanges.reduction import Grads, mean_over_ranks, sum_over_ranks
from tw_ranks._group import ProcessGroup, endpoint_of


@elementwise
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
      grads: [K][N] of this rank's K towers; dense or ``tf.IndexedSlices``. N, shapes
        and dtypes are the same on all ranks. Half-precision floats are added in
        float32.
      group: the ranks.
      sum_towers: [K][N] -> [K][N], adds the gradients of this rank's towers, e.g. a
        reducer of tw-reduce; by default each sum is on the device of tower 0's
        gradient.
      wire_dtype: "float16" or "bfloat16", in which wider floats are sent; they are
        added in float32, and the sum is rounded again to be sent back. Values of sparse
        gradients are sent in it too, but not added here; indices keep their dtype.
        None: all gradients are sent in their own dtypes.
      names: [N] of the variables, for messages; ranks must agree on them.

    Returns:
      [K][N], the same bits for all towers of all ranks. Sparse gradients have the rows
      of all ranks; rows with equal indices are added only if no rank repeats an index
      (see ``tw_core.internal.has_unique_rows``).

    Raises:
      ValueError: lists of unequal length, dtypes that cannot be added, or gradients
        that do not match those of another rank.
      TypeError: an argument has the wrong type.
      RankTimeoutError: a rank is missing (see ``ProcessGroup.bounded``).
    """
    return sum_over_ranks(
        *(grads, endpoint_of(group)),
        sum_towers=sum_towers,
        wire_dtype=wire_dtype,
        names=names,
    )


@elementwise
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
      weight: the weight of this rank's mean over its towers: a number or scalar tensor,
        0 or more, such as the number of rows in its batch. None: equal weights, divided
        by the number of ranks, including those that contribute nothing.
      weights: [K], of this rank's towers, such as the number of rows of each; replaces
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
    return mean_over_ranks(
        *(grads, endpoint_of(group)),
        weight=weight,
        weights=weights,
        sum_towers=sum_towers,
        wire_dtype=wire_dtype,
        names=names,
    )


@elementwise
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
    builders, and the optimizers of tw-ampopt and tw-rlload. Their steps then equal one
    step on the batches of all ranks together. Arguments and errors are those of
    ``mean_across``; where ``tw_reduce.mean(reducer, weights=...)`` wraps this reducer,
    ``weight`` is the sum of the towers' weights.

    Returns:
      [K][N]: K times the mean.
    """
    return mean_over_ranks(
        *(grads, endpoint_of(group)),
        weight=weight,
        sum_towers=sum_towers,
        wire_dtype=wire_dtype,
        names=names,
        divides_towers=False,
    )

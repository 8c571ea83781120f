"""Means over towers, plain or weighted, and the classes of reducers that wrap others.

The multiplication costs a pass over every gradient. Where the loss or the learning
rate can take the factor 1/K instead, the plain sum is the faster mean.

A weighted mean multiplies each tower's gradients by its weight in a common unit, and
the sums by 1/total. If the weights are equal, they are exactly 1 and the total K, and
the result has the plain mean's bits.

A combinator that only joins, cuts, copies or rounds beforehand commutes with the
multiplication by 1/K afterwards. ``Combinator`` shows its inner reducer, so that
``mean`` can multiply there, where there are fewer tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core.internal import (
    Gradients,
    check_weights,
    host_of,
    is_elementwise,
    read_gradients,
    scale,
    shares_of,
    weigh,
    without_autograph,
)
from tw_reduce._checks import check_reducer, positions_of
from tw_reduce._reducer import (
    HALF_DTYPES,
    Reducer,
    Tensorlike,
    TowerTensors,
    cast_to,
    map_dense,
    map_results,
    reduced_by,
)

Move: TypeAlias = Callable[[Reducer, Gradients], list[list[Tensorlike]]]
Deal: TypeAlias = Callable[[Mapping[str, Reducer], Gradients], list[list[Tensorlike]]]


@dataclass(frozen=True, eq=False)
class Combinator:
    """A reducer around another."""

    name: str  # the public function that made it
    inner: Reducer
    move: Move  # calls ``inner``; changes no value after it
    # Replaces ``move`` under ``mean``, and divides before ``inner`` adds; None where
    # ``inner`` is to return means.
    mean_move: Move | None = None
    commutes: bool = True  # ``mean`` may go inside; else it divides the results
    joins: bool = False  # only joins, cuts and copies: weights may go inside

    @property
    def averages(self) -> bool:
        """Whether the results are means, by ``mean`` here or further inside."""
        return self.name == "mean" or getattr(self.inner, "averages", False)

    @property
    def elementwise(self) -> bool:
        """Whether it may be given packs: whether the reducer inside may."""
        return is_elementwise(self.inner)

    @without_autograph
    def __call__(self, grads: TowerTensors) -> list[list[Tensorlike]]:
        """Reduces [K][N] gradients."""
        return self.move(self.inner, read_gradients(grads))


@dataclass(frozen=True, eq=False)
class Dealer:
    """A reducer that distributes the gradients among other reducers."""

    name: str  # the public function that made it
    reducers: Mapping[str, Reducer]
    deal: Deal  # returns results in the gradients' order; changes no value

    @property
    def averages(self) -> bool:
        """Whether some results are means."""
        return any(getattr(own, "averages", False) for own in self.reducers.values())

    @property
    def elementwise(self) -> bool:
        """Whether it may be given packs: whether all reducers inside may."""
        return all(map(is_elementwise, self.reducers.values()))

    @without_autograph
    def __call__(self, grads: TowerTensors) -> list[list[Tensorlike]]:
        """Reduces [K][N] gradients."""
        return self.deal(self.reducers, read_gradients(grads))


def deal_out(
    names: Sequence[str], reducers: Mapping[str, Reducer], grads: Gradients
) -> list[list[Tensorlike]]:
    """Reduces gradient n by ``reducers[names[n]]``, in a scope of that name."""
    results: list[dict[int, Tensorlike]] = [{} for _ in grads]
    for name, reducer in reducers.items():
        positions = [n for n, own in enumerate(names) if own == name]
        if not positions:
            continue
        part = [[tower[n] for n in positions] for tower in grads]
        with tf.name_scope(name):
            reduced = reduced_by(reducer, Gradients(part, tests=grads.tests))
        for row, tower in zip(results, reduced, strict=True):
            row.update(zip(positions, tower, strict=True))
    return [[row[n] for n in range(len(names))] for row in results]


def mean(reducer: Reducer, *, weights: Sequence[Any] | None = None) -> Reducer:
    """Makes a reducer of sums into one of means over towers.

    Args:
      reducer: [K][N] -> [K][N] sums.
      weights: [K] the weight of each tower's gradients, such as its number of rows or
        tokens or its sum of sample weights: numbers or scalar tensors of any real
        dtype, 0 or more. If each gradient is the mean over that many rows, the result
        is the mean over all rows. A tower of weight 0 does not count, even if its
        gradients are NaN, as those of an empty batch are; if all weights are 0, so are
        the means. None for equal weights.

    Returns:
      A reducer that multiplies each sum by 1/K once, on the device where it
      is, even if several towers share it; inside ``packed``, ``broadcast``,
      ``partition``, ``auto`` and ``all_reduce``, so that a pack is multiplied as
      one. For a sparse sum the values are multiplied. A single tower's results are
      returned unchanged.

      float16 and bfloat16 gradients are widened, added and multiplied in
      float32, and rounded once, to the mean: their sum may be out of range
      when the mean is not. They are sent narrow to the device that adds them;
      collectives and NCCL, which add while they send, send float32. Around
      ``accumulate_as(reducer, tf.float16)`` the gradients are divided first.

      With weights, each tower's gradients are multiplied on its device, a pack as
      one; float16 gradients are then sent as float32. The unit of weight is a power of
      two, so that whole numbers stay exact; if all weights are equal it is their
      value, which gives the same bits as None. If weights are tensors of a graph or
      ``tf.function``, make the reducer there too.

      Its attribute ``averages`` is True, as is that of combinators around it.

    Raises:
      TypeError: ``reducer`` is not a function, or a weight is neither a number nor a
        scalar tensor; when called with integer gradients, which have no exact mean.
      ValueError: a number among the weights is negative; when called, ``reducer``
        returns a list of another shape, or there is not one weight per tower.
    """
    check_reducer(reducer=reducer)
    if weights is None:
        return Combinator("mean", means_of(reducer), _move_divisible)
    check_weights(weights)
    return Combinator("mean", reducer, partial(_move_weighted, tuple(weights)))


def check_divisible(grads: TowerTensors) -> None:
    """Refuses integer gradients, naming their positions and dtypes."""
    if whole := positions_of(grads, lambda t: not (t.is_floating or t.is_complex)):
        raise TypeError(
            f"Gradients must be floating; got others at positions {whole}. Reduce them "
            "without the mean, or cast them first."
        )


def _move_divisible(reducer: Reducer, grads: Gradients) -> list[list[Tensorlike]]:
    check_divisible(grads)  # where positions are the caller's
    return reducer(grads)


def _move_weighted(
    weights: Sequence[Any], reducer: Reducer, grads: Gradients
) -> list[list[Tensorlike]]:
    check_divisible(grads)
    check_weights(weights, num_towers=len(grads))
    return mean_by_weight(reducer, weights, grads) if any(grads) else reducer(grads)


def mean_by_weight(
    reducer: Reducer, weights: Sequence[Any], grads: Gradients
) -> list[list[Tensorlike]]:
    """Calls ``mean(reducer, weights=weights)`` without its checks."""
    with tf.name_scope("weights"), tf.device(host_of(grads[0][0].device)):
        shares = shares_of(weights)
        factor = tf.math.divide_no_nan(tf.ones([], tf.float64), tf.add_n(shares))
    return _of_weighted_means(reducer, shares, factor)(grads)


def _of_weighted_means(
    reducer: Reducer, shares: Sequence[tf.Tensor], factor: tf.Tensor
) -> Reducer:
    """Multiplies where there are the fewest tensors, and takes means inside."""
    if isinstance(reducer, Combinator) and reducer.joins:
        inner = _of_weighted_means(reducer.inner, shares, factor)
        return replace(reducer, inner=inner)
    if isinstance(reducer, Dealer):
        weighted = {
            name: _of_weighted_means(inner, shares, factor)
            for name, inner in reducer.reducers.items()
        }
        return replace(reducer, reducers=weighted)
    joins_shares = getattr(reducer, "takes_shares", False)
    if joins_shares or (isinstance(reducer, Combinator) and reducer.mean_move):
        # It adds in a dtype that cannot hold the sums, or remembers unsent parts.
        divided = [own * factor for own in shares]
        return _around(reducer, partial(_reduce_weighted, divided, reducer))
    inner = means_of(reducer, factor)
    return _around(reducer, partial(_reduce_weighted, shares, inner))


def _reduce_weighted(
    shares: Sequence[tf.Tensor], reducer: Reducer, grads: Gradients
) -> list[list[Tensorlike]]:
    with tf.name_scope("weigh"):
        weighed = [
            [map_dense(partial(weigh, weight=share), _widen(own)) for own in tower]
            for tower, share in zip(grads, shares, strict=True)
        ]
    means = reduced_by(reducer, Gradients(weighed, tests=grads.tests))
    return map_results(lambda own, like: cast_to(own, like.dtype), means, grads)


def means_of(reducer: Reducer, factor: tf.Tensor | None = None) -> Reducer:
    """As ``mean``, for a reducer that needs no checks, and floating gradients.

    Multiplies sums by ``factor``, or 1/K, as far inside as possible.
    """
    if isinstance(reducer, Dealer):  # Each widens float16: it may deal by dtype.
        means = {
            name: means_of(inner, factor) for name, inner in reducer.reducers.items()
        }
        return replace(reducer, reducers=means)
    if getattr(reducer, "takes_shares", False):
        return partial(_reduce_shares, reducer, factor)
    if not isinstance(reducer, Combinator) or not reducer.commutes:
        return _around(reducer, partial(_reduce_to_means, reducer, factor))
    if reducer.mean_move is None:
        return replace(reducer, inner=means_of(reducer.inner, factor))
    if factor is None:
        return replace(reducer, move=reducer.mean_move)
    return _around(reducer, partial(_reduce_to_means, reducer, factor))


def _reduce_shares(
    reducer: Reducer, factor: tf.Tensor | None, grads: Gradients
) -> list[list[Tensorlike]]:
    """Multiplies first, so that the parts that a reducer remembers are of the mean."""
    if len(grads) == 1 and factor is None:
        return reduced_by(reducer, grads)
    own = 1.0 / len(grads) if factor is None else factor
    shares = [[_scale(own, _widen(t), _widen(t)) for t in tower] for tower in grads]
    means = reduced_by(reducer, Gradients(shares, tests=grads.tests))
    return map_results(lambda own, like: cast_to(own, like.dtype), means, grads)


def _around(reducer: Reducer, made: Reducer) -> Reducer:
    """Marks ``made``, which multiplies, as elementwise if the reducer inside is."""
    if is_elementwise(reducer):
        made.elementwise = True  # type: ignore[attr-defined]
    return made


def _reduce_to_means(
    reducer: Reducer, factor: tf.Tensor | None, grads: Gradients
) -> list[list[Tensorlike]]:
    halves = len(grads) > 1 and any(own.dtype in HALF_DTYPES for own in grads[0])
    given = grads
    if halves:  # Reducers undo the cast for the transfer.
        with tf.name_scope("mean"):
            wide = [[_widen(tensor) for tensor in tower] for tower in grads]
        given = Gradients(wide, tests=grads.tests)
    sums = reduced_by(reducer, given)
    if len(grads) == 1 and factor is None:
        return sums
    with tf.name_scope("mean"):
        own = 1.0 / len(grads) if factor is None else factor
        return map_results(partial(_scale, own), sums, grads)


def _widen(tensor: Tensorlike) -> Tensorlike:
    return cast_to(tensor, tf.float32) if tensor.dtype in HALF_DTYPES else tensor


def _scale(
    factor: float | tf.Tensor, total: Tensorlike, like: Tensorlike
) -> Tensorlike:
    with tf.device(total.device):
        scaled = scale(total, factor)
    return cast_to(scaled, like.dtype if like.dtype in HALF_DTYPES else total.dtype)

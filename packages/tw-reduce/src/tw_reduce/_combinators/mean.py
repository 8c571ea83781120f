"""Dividing a sum by the number of towers, and the form of reducers made of others.

The multiplication costs a pass over every gradient. Where the loss or the learning
rate can take the factor 1/K instead, the plain sum is the faster mean.

What only joins, cuts, copies or rounds beforehand commutes with multiplying by 1/K
afterwards. ``Combinator`` shows what is inside, so that ``mean`` multiplies there,
where there are fewer tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import tensorflow as tf

from tw_core.checks import check_function
from tw_core.modes import without_autograph
from tw_reduce._checked_towers import CheckedTowers, checked_towers
from tw_reduce._checks import positions_of, reduced_by
from tw_reduce._reducer import (
    HALF_DTYPES,
    Reducer,
    Tensorlike,
    TowerTensors,
    map_dense,
    map_results,
)

Move: TypeAlias = Callable[[Reducer, CheckedTowers], list[list[Tensorlike]]]
Deal: TypeAlias = Callable[
    [Mapping[str, Reducer], CheckedTowers], list[list[Tensorlike]]
]


@dataclass(frozen=True, eq=False)
class Combinator:
    """A reducer around another.

    Attributes:
      name: the public function that made it; opens the messages of what is refused.
      inner: adds.
      move: takes ``inner`` and [K][N] gradients, and returns what ``inner``
        made of them, moved back; it changes no value after ``inner``.
      mean_move: takes the place of ``move`` under ``mean``, and divides the
        gradients before ``inner`` adds them; None where ``inner`` is to give means.
      commutes: whether means may be taken inside; else ``mean`` divides the results.
    """

    name: str
    inner: Reducer
    move: Move
    mean_move: Move | None = None
    commutes: bool = True

    @property
    def averages(self) -> bool:
        """Whether the results are means, by ``mean`` here or further inside."""
        return self.name == "mean" or getattr(self.inner, "averages", False)

    @without_autograph
    def __call__(self, grads: TowerTensors) -> list[list[Tensorlike]]:
        """Reduces [K][N] gradients."""
        return self.move(self.inner, checked_towers(grads, caller=self.name))


@dataclass(frozen=True, eq=False)
class Dealer:
    """A reducer that deals the gradients out to others.

    Attributes:
      name: opens the messages of what is refused.
      reducers: by name; they add.
      deal: takes ``reducers`` and [K][N] gradients, and returns what they made
        of them, in the gradients' order; it changes no value.
    """

    name: str
    reducers: Mapping[str, Reducer]
    deal: Deal

    @property
    def averages(self) -> bool:
        """Whether all results are means."""
        return all(getattr(own, "averages", False) for own in self.reducers.values())

    @without_autograph
    def __call__(self, grads: TowerTensors) -> list[list[Tensorlike]]:
        """Reduces [K][N] gradients."""
        return self.deal(self.reducers, checked_towers(grads, caller=self.name))


def mean(reducer: Reducer) -> Reducer:
    """Makes a reducer of sums into one of means over towers.

    Args:
      reducer: [K][N] -> [K][N] sums.

    Returns:
      A reducer that multiplies each sum by 1/K once, on the device where it
      lies, however many towers share it; inside ``packed`` and ``broadcast``, so
      that a pack is multiplied as one. Of a sparse sum the values are
      multiplied. One tower is returned as the reducer gave it.

      float16 and bfloat16 gradients are widened, added and multiplied in
      float32, and rounded once, to the mean: their sum may be out of range
      where the mean is not. They travel narrow to where they are added;
      collectives and NCCL, which add while they send, carry float32. Around
      ``accumulate_as(reducer, tf.float16)`` the gradients are divided first.

      Its attribute ``averages`` is True, as that of what is put around it.

    Raises:
      TypeError: ``reducer`` is not a function; when called with integer gradients,
        which have no exact mean.
      ValueError: when ``reducer`` returns another shape of list.
    """
    check_function("mean", reducer=reducer)
    return Combinator("mean", _of_means(reducer), _move_divisible)


def check_divisible(grads: TowerTensors, *, caller: str) -> None:
    """Refuses integer gradients, naming their positions and dtypes."""
    if whole := positions_of(grads, lambda t: not (t.is_floating or t.is_complex)):
        raise TypeError(
            f"{caller}: gradients must be floating; got others at positions {whole}. "
            "Reduce them without the mean, or cast them first."
        )


def _move_divisible(reducer: Reducer, grads: CheckedTowers) -> list[list[Tensorlike]]:
    check_divisible(grads, caller="mean")  # where positions are the caller's
    return reducer(grads)


def _of_means(reducer: Reducer) -> Reducer:
    if not isinstance(reducer, Combinator) or not reducer.commutes:
        return partial(_reduce_to_means, reducer)
    if reducer.mean_move is not None:
        return replace(reducer, move=reducer.mean_move)
    return replace(reducer, inner=_of_means(reducer.inner))


def _reduce_to_means(reducer: Reducer, grads: CheckedTowers) -> list[list[Tensorlike]]:
    halves = len(grads) > 1 and any(own.dtype in HALF_DTYPES for own in grads[0])
    if halves and isinstance(reducer, Dealer):
        # What they are dealt out by may be their dtype.
        means = {name: _of_means(inner) for name, inner in reducer.reducers.items()}
        return replace(reducer, reducers=means)(grads)
    sums = reduced_by(reducer, _widened(grads) if halves else grads, caller="mean")
    if len(grads) == 1:
        return sums
    with tf.name_scope("mean"):
        return map_results(partial(_scale, 1.0 / len(grads)), sums, grads)


def _widened(grads: CheckedTowers) -> CheckedTowers:
    """Casts float16 and bfloat16 to float32, which reducers undo for the transfer."""
    with tf.name_scope("mean"):
        wide = [[_widen(tensor) for tensor in tower] for tower in grads]
    return CheckedTowers(wide, grads.tests)


def _widen(tensor: Tensorlike) -> Tensorlike:
    if tensor.dtype not in HALF_DTYPES:
        return tensor
    return map_dense(lambda dense: tf.cast(dense, tf.float32), tensor)


def _scale(factor: float, total: Tensorlike, like: Tensorlike) -> Tensorlike:
    dtype = like.dtype if like.dtype in HALF_DTYPES else total.dtype

    def scale(dense: tf.Tensor) -> tf.Tensor:
        return tf.cast(dense * tf.constant(factor, dense.dtype), dtype)

    return map_dense(scale, total)

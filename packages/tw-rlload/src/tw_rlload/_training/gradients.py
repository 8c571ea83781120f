"""From every tower's gradients to those applied: weight, reduce, average, clip.

This is the same in both modes. Towers may share variables or have their own; the caller
applies tower 0's result, or every tower's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from tw_core import Tower
from tw_core.gradients import check_grad_list
from tw_core.internal import (
    Gradients,
    check_any_gradient,
    check_flag,
    check_function,
    check_number,
    finite_and_norm,
    map_values,
    read_pairs,
    scale,
    tf_variable,
    values_of,
    weight_dtype,
    with_unique_rows,
    without_autograph,
)
from tw_reduce import Reducer, ReducerState, StatefulReducer, all_reduce, mean
from tw_reduce.internal import is_stateful
from tw_reduce.reducers import check_adds
from tw_rlload._loading.specs import is_numeric

Pairs: TypeAlias = "list[tuple[Any, tf.Variable]]"
ApplyFn: TypeAlias = Callable[
    [Sequence[Tower], list[list[Any]], list[list[Any]], Any], Any
]
"""Applies gradients once, and copies the new values to all towers.

Takes K towers, their [K][N] combined gradients (None for a variable in all of them or
in none), their [K][N] variables and the one optimizer. In a session graph it returns
the op that does so.
"""


@without_autograph
def weighted_mean(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Averages values by weights; 0 if no weight is above 0.

    A tower's loss under ``remainder="pad"`` is such a mean, so that pads do not count
    and a tower with only pads returns 0 rather than NaN.

    Args:
      values: [N], floating.
      weights: [N], 1 for rows of the batch and 0 for pads; of any dtype.

    Returns:
      A scalar of the dtype of ``values``: sum(values * weights) / sum(weights).

    Raises:
      TypeError: not tensors of numbers, or values that are not floating.
      ValueError: shapes that differ, or whose rank is not 1.
    """
    values, weights = _numbers("values", values), _numbers("weights", weights)
    if not values.dtype.is_floating:
        raise TypeError(f"values must be floating; got {values.dtype.name}.")
    shape = values.shape
    if not (
        shape.is_compatible_with([None]) and shape.is_compatible_with(weights.shape)
    ):
        raise ValueError(
            f"values and weights must both have shape [rows]; got {shape} and "
            f"{weights.shape}. Average over other axes first."
        )
    with tf.name_scope("weighted_mean"):
        weights = tf.cast(weights, values.dtype)
        total = tf.reduce_sum(values * weights)
        return tf.math.divide_no_nan(total, tf.reduce_sum(weights))


class Memory:
    """Holds the state of a reducer with memory, once the variables are known."""

    def __init__(self, reducer: Any, towers: Sequence[Tower]) -> None:
        self._reducer, self._devices = reducer, [own.device for own in towers]
        self.state: ReducerState | None = None

    def make(self, variables: Sequence[Sequence[Any]]) -> ReducerState:
        """Returns the state, made for [K][N] variables at the first call."""
        if self.state is None:
            self.state = ReducerState(self._reducer, variables, devices=self._devices)
        return self.state


@dataclass(frozen=True)
class Update:
    """How towers' gradients become an update: summed, averaged, clipped, applied."""

    towers: tuple[Tower, ...]
    reducer: Reducer
    bound: float | None  # of the averaged gradients' global norm
    apply_fn: Any  # an ApplyFn; None where optimizers apply
    keeps_sparse: bool  # else gradients of embeddings are made dense, as RLlib's are
    memory: Memory | None = None

    def combine(
        self,
        grad_list: Sequence[Pairs],
        tower_weights: Sequence[tf.Tensor] | None,
        *,
        bound: tf.Tensor | float | None,  # in the scale of the gradients
        own_variables: bool,
        loss_scale: tf.Tensor | None = None,  # to reduce gradients without it
        finishes: bool = True,
    ) -> list[Pairs]:
        """Averages the towers' gradients and, unless ``finishes`` is False, clips them.

        Returns [K][M] pairs of the M variables that have a gradient. A tower of weight
        0 does not count, even if its gradients are NaN. Shapes that are not known yet
        are checked by ops such as ``check_gradient_shape/tower0/w``.
        """
        found = [grad for tower in grad_list for grad, _ in tower]
        check_any_gradient(found, [variable for _, variable in grad_list[0]])
        kept = _without_missing(grad_list)
        read = read_pairs(kept, variables="own" if own_variables else "any")
        means = self._means(grad_list, read, tower_weights, loss_scale)
        if not finishes:
            return Gradients(means, read.variables).pairs
        # Reducers that add in one place return one list for all towers: clip it once.
        unique = {tuple(map(id, tower)): tower for tower in means}
        clipped = {
            key: self.finished(own, read.variables[0], bound)
            for key, own in unique.items()
        }
        averaged = [clipped[tuple(map(id, tower))] for tower in means]
        return Gradients(averaged, read.variables).pairs

    def _means(
        self,
        grad_list: Sequence[Pairs],
        read: Gradients,
        weights: Sequence[tf.Tensor] | None,
        loss_scale: tf.Tensor | None,
    ) -> list[list[Any]]:
        reducer = self.reducer
        if self.memory is not None:
            every = [[variable for _, variable in tower] for tower in grad_list]
            reducer = self.memory.make(every).of(read.variables[0])
        reducer = mean(reducer, weights=weights)
        if loss_scale is None:
            return reducer(read)
        # The loss scale may change before the next step, the kept memory must not.
        unscaled = [[_times(grad, 1.0 / loss_scale) for grad in own] for own in read]
        means = reducer(Gradients(unscaled, tests=read.tests))
        return [[_times(grad, loss_scale) for grad in own] for own in means]

    def finished(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        bound: tf.Tensor | float | None,
    ) -> list[Any]:
        """Prepares a tower's averaged gradients to be applied: dense, and clipped."""
        if self.keeps_sparse:
            return _clipped([with_unique_rows(grad) for grad in grads], bound)
        pairs = zip(grads, variables, strict=True)
        return _clipped([_dense(grad, variable) for grad, variable in pairs], bound)

    def apply_once(
        self,
        pairs: Sequence[Pairs],
        variables: Sequence[Sequence[Any]],
        optimizer: Any,
    ) -> Any:
        """Calls ``apply_fn`` with combined pairs, and None for all other variables.

        It receives every variable, so that their owners do not depend on the loss.
        """
        grads = []
        for found, own in zip(pairs, variables, strict=True):
            grad_of = {id(tf_variable(variable)): grad for grad, variable in found}
            grads.append([grad_of.get(id(tf_variable(variable))) for variable in own])
        own_lists = [list(own) for own in variables]
        return self.apply_fn(self.towers, grads, own_lists, optimizer)


def read_update(
    towers: Sequence[Tower],
    reducer: Reducer | StatefulReducer | None,
    grad_norm_clipping: float | None,
    apply_fn: ApplyFn | None,
    sparse_gradients: bool,
) -> Update:
    """Checks the arguments that both modes take; a bound of 0 means no bound."""
    if reducer is None:
        reducer = all_reduce([tower.device for tower in towers])
    else:
        reducer = check_adds(reducer=reducer)
    memory = Memory(reducer, towers) if is_stateful(reducer) else None
    bound = grad_norm_clipping
    if bound is not None:
        bound = check_number(grad_norm_clipping=bound, at_least=0) or None
    if apply_fn is not None:
        check_function(apply_fn=apply_fn)
    keeps_sparse = check_flag(sparse_gradients=sparse_gradients)
    return Update(tuple(towers), reducer, bound, apply_fn, keeps_sparse, memory)


def _times(grad: Any, factor: tf.Tensor) -> Any:
    with tf.device(values_of(grad).device):
        return scale(grad, factor)


def _numbers(name: str, value: object) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        tensor = None
    if tensor is None or not is_numeric(tensor.dtype):
        raise TypeError(
            f"{name} must be a tensor of numbers; got {value!r:.80} "
            f"({type(value).__name__})."
        )
    return tensor


def _without_missing(grad_list: Sequence[Pairs]) -> list[Pairs]:
    """Leaves out the variables for which every tower has None."""
    if len({len(tower) for tower in grad_list}) > 1:
        check_grad_list(grad_list, allow_none=True)
    columns = zip(*grad_list, strict=True)
    used = [own for own in columns if any(grad is not None for grad, _ in own)]
    return [list(tower) for tower in zip(*used, strict=True)]


def _dense(grad: Any, variable: Any) -> Any:
    """Makes a sparse gradient dense, on the device of its values."""
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    num_rows = tf_variable(variable).shape[0]
    with tf.device(grad.values.device):
        return tf.math.unsorted_segment_sum(grad.values, grad.indices, num_rows)


def _clipped(grads: list[Any], bound: tf.Tensor | float | None) -> list[Any]:
    if bound is None:
        return grads
    # TensorFlow needs one dtype, and its squares and factors overflow float16.
    dtypes = [values_of(grad).dtype for grad in grads]
    wide = weight_dtype(map(values_of, grads))
    casted = [_cast(grad, wide) for grad in grads]
    _, norm = finite_and_norm(casted)
    bound = tf.cast(bound, wide) if tf.is_tensor(bound) else bound
    clipped, _ = tf.clip_by_global_norm(casted, bound, use_norm=norm)
    return [_cast(grad, dtype) for grad, dtype in zip(clipped, dtypes, strict=True)]


def _cast(grad: Any, dtype: tf.DType) -> Any:
    """Casts a floating-point gradient on its own device."""
    values = values_of(grad)
    if values.dtype == dtype or not values.dtype.is_floating:
        return grad
    with values.graph.colocate_with(values.op):
        return map_values(lambda found: tf.cast(found, dtype), grad)

"""How sparse gradients of several replicas become one: by replicas or by rows.

``"replicas"`` divides the sum by the number of replicas, as dense gradients
are: a row that one of two replicas touched counts half. ``"per_row"`` divides
each row by the number of replicas that touched it, as TensorFlow's class does,
and takes TensorFlow's accumulator for it, so that repeated indices in one
gradient count as they do there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

_ALWAYS = 2**62
_NEVER = -1
"""Local steps of gradients that an accumulator never, and always, calls stale."""


@dataclass(frozen=True)
class RowSums:
    """One sparse gradient.

    While replicas are added, its state is three tensors: the values and the
    indices of all replicas one after the other, and the rows of each.

    Attributes:
      index: its place in the caller's list.
      dtype: name of the values' element type.
      index_dtype: name of the indices' element type.
      shape: sizes of the variable.
      slots: replicas that may be added, at most.
      accumulator: TensorFlow's, where rows are counted one by one, else None.
    """

    index: int
    dtype: str
    index_dtype: str
    shape: tuple[int, ...]
    slots: int
    accumulator: Any = None

    def wire_shapes(self) -> list[tf.TensorShape]:
        """Returns the shapes of values [rows, ...] and indices [rows]."""
        return [tf.TensorShape([None, *self.shape[1:]]), tf.TensorShape([None])]

    def state_shapes(self) -> list[tf.TensorShape]:
        """Returns the shapes of the state."""
        return [*self.wire_shapes(), tf.TensorShape([None])]

    def start(self) -> list[tf.Tensor]:
        """Returns the state of no replica."""
        return [
            tf.zeros([0, *self.shape[1:]], self.dtype),
            tf.zeros([0], self.index_dtype),
            tf.zeros([0], tf.int32),
        ]

    def add(
        self, state: Sequence[tf.Tensor], values: tf.Tensor, indices: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the state after one more replica."""
        more = [values, indices, tf.shape(indices)]
        return [tf.concat(both, axis=0) for both in zip(state, more, strict=True)]

    def mean(self, state: Sequence[tf.Tensor], count: tf.Tensor) -> tf.IndexedSlices:
        """Returns the mean over ``count`` replicas (int32 []) or over each row's."""
        if self.accumulator is not None:
            return self._mean_by_row(state, count)
        values, indices, _ = state
        return tf.IndexedSlices(
            values / tf.cast(count, values.dtype), indices, self._dense_shape()
        )

    def forget(self) -> list[tf.Operation]:
        """Returns ops that empty the accumulator."""
        if self.accumulator is None:
            return []
        nothing = tf.zeros([1, *self.shape[1:]], self.dtype)
        with tf.control_dependencies([self._put(nothing, tf.constant([0]))]):
            return [self.accumulator.take_indexed_slices_grad(1).values.op]

    def _mean_by_row(
        self, state: Sequence[tf.Tensor], count: tf.Tensor
    ) -> tf.IndexedSlices:
        values, indices, rows = state
        ends = tf.concat([[0], tf.cumsum(rows)], axis=0)
        put: list[tf.Operation] = []
        # The accumulator's handle is a reference, which no loop can hold.
        for slot in range(self.slots):
            is_filled = slot < count
            begin = ends[tf.minimum(slot, count - 1)]
            end = ends[tf.minimum(slot, count - 1) + 1]
            step = tf.where(is_filled, tf.constant(_ALWAYS, tf.int64), _NEVER)
            with tf.control_dependencies(put):
                put = [self._put(values[begin:end], indices[begin:end], step)]
        with tf.control_dependencies(put):
            grad = self.accumulator.take_indexed_slices_grad(1)
        return tf.IndexedSlices(
            grad.values, tf.cast(grad.indices, self.index_dtype), self._dense_shape()
        )

    def _put(
        self, values: tf.Tensor, indices: tf.Tensor, step: Any = _ALWAYS
    ) -> tf.Operation:
        rows = tf.IndexedSlices(values, tf.cast(indices, tf.int64))
        return self.accumulator.apply_indexed_slices_grad(rows, local_step=step)

    def _dense_shape(self) -> tf.Tensor:
        return tf.constant(self.shape, tf.int64)

"""How several replicas' sparse gradients are added up.

They become one by ``sparse_mean``: "replicas" divides the sum by the number of replicas
(or by their total weight), as for dense gradients, so that a row that one of two
replicas touched counts half. "per_row" divides each row by the number of replicas that
touched it, as TensorFlow's class does, and uses TensorFlow's accumulator, so that
repeated indices in one gradient count as they do there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

SPARSE_MEANS = ("replicas", "per_row")

# Local steps of gradients that an accumulator always, and never, accepts as fresh.
_FRESH = 2**62
_STALE = -1


@dataclass(frozen=True)
class RowSums:
    """One sparse gradient.

    While replicas are added, its state is three tensors: the values and the
    indices of all replicas, concatenated, and the number of rows of each.
    """

    index: int  # its place in the caller's list
    dtype: tf.DType  # of the values
    index_dtype: tf.DType
    shape: tuple[int, ...]  # of the variable
    slots: int  # the largest number of replicas that may be added
    accumulator: Any = None  # TensorFlow's, if each row is counted by itself

    def wire_shapes(self) -> list[tf.TensorShape]:
        """Returns the shapes of values [rows, ...] and indices [rows]."""
        return [tf.TensorShape([None, *self.shape[1:]]), tf.TensorShape([None])]

    def state_shapes(self) -> list[tf.TensorShape]:
        """Returns the shapes of the state."""
        return [*self.wire_shapes(), tf.TensorShape([None])]

    @property
    def sum_dtype(self) -> tf.DType:
        """Dtype of the values in the state."""
        return sum_dtype_of(self.dtype) if self.accumulator is None else self.dtype

    def zeros(self) -> list[tf.Tensor]:
        """Returns the state before the first replica."""
        return [
            tf.zeros([0, *self.shape[1:]], self.sum_dtype),
            tf.zeros([0], self.index_dtype),
            tf.zeros([0], tf.int32),
        ]

    def add(
        self, state: Sequence[tf.Tensor], values: tf.Tensor, indices: tf.Tensor
    ) -> list[tf.Tensor]:
        """Returns the state after one more replica."""
        more = [values, indices, tf.shape(indices)]
        return [tf.concat(both, axis=0) for both in zip(state, more, strict=True)]

    def mean(
        self, state: Sequence[tf.Tensor], count: tf.Tensor, divisor: tf.Tensor
    ) -> tf.IndexedSlices:
        """Returns the mean over ``count`` replicas, or over those touching each row."""
        if self.accumulator is not None:
            return self._mean_by_row(state, count)
        values, indices, _ = state
        mean = values / tf.cast(divisor, values.dtype)
        return self._slices(tf.cast(mean, self.dtype), indices)

    def clear(self) -> list[tf.Operation]:
        """Returns the ops that empty the accumulator."""
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
        # The accumulator's handle is a reference, which a loop cannot hold.
        for slot in range(self.slots):
            is_filled = slot < count
            begin = ends[tf.minimum(slot, count - 1)]
            end = ends[tf.minimum(slot, count - 1) + 1]
            step = tf.where(is_filled, tf.constant(_FRESH, tf.int64), _STALE)
            with tf.control_dependencies(put):
                put = [self._put(values[begin:end], indices[begin:end], step)]
        with tf.control_dependencies(put):
            grad = self.accumulator.take_indexed_slices_grad(1)
        return self._slices(grad.values, tf.cast(grad.indices, self.index_dtype))

    def _put(
        self, values: tf.Tensor, indices: tf.Tensor, step: Any = _FRESH
    ) -> tf.Operation:
        rows = tf.IndexedSlices(values, tf.cast(indices, tf.int64))
        return self.accumulator.apply_indexed_slices_grad(rows, local_step=step)

    def _slices(self, values: tf.Tensor, indices: tf.Tensor) -> tf.IndexedSlices:
        return tf.IndexedSlices(values, indices, tf.constant(self.shape, tf.int64))


def make_row_sums(
    index: int,
    grad: tf.IndexedSlices,
    variable: tf.Variable,
    *,
    slots: int,
    sparse_mean: str,
    shared_name: str,
) -> RowSums:
    """Makes the sums of one sparse gradient; to be called in ``detached_scope``."""
    accumulator = None
    if sparse_mean == "per_row":
        with tf.device(variable.device):
            accumulator = tf.compat.v1.SparseConditionalAccumulator(
                grad.values.dtype,
                shape=(),
                shared_name=f"{shared_name}/rows_{index}",
                name="rows",
            )
    return RowSums(
        index,
        grad.values.dtype,
        grad.indices.dtype,
        tuple(variable.shape.as_list()),
        slots=slots,
        accumulator=accumulator,
    )


def sum_dtype_of(dtype: Any) -> tf.DType:
    """Returns the dtype that gradients are added in: float32 for narrower floats."""
    dtype = tf.as_dtype(dtype)
    is_narrow = dtype.is_floating and dtype.size < tf.float32.size
    return tf.float32 if is_narrow else dtype

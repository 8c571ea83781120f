"""How several replicas' sparse gradients are added up.

``sparse_mean`` chooses the divisor. "replicas" divides the sum by the number of
replicas (or by their total weight), as for dense gradients, so that a row that one of
two replicas touched counts half. "per_row" divides each row by the number of replicas
that touched it, as TensorFlow's class does, and uses TensorFlow's accumulator, so that
repeated indices in one gradient count as they do there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

SPARSE_MEANS = ("replicas", "per_row")

# Local steps of gradients that an accumulator always, or never, accepts as fresh.
_FRESH = 2**62
_STALE = -1


@dataclass(frozen=True)
class RowSums:
    """One sparse gradient.

    While replicas are added, its state is two lists of tensors, of the replicas' values
    and of their indices. Lists do not copy their elements: values are copied once, when
    all have arrived. With weights, a third part is each replica's factor, float64 [R].
    """

    index: int  # its place in the caller's list
    dtype: tf.DType  # of the values
    index_dtype: tf.DType
    shape: tuple[int, ...]  # of the variable
    slots: int  # the largest number of replicas that may be added
    accumulator: Any = None  # TensorFlow's, if each row is counted by itself
    weighs: bool = False  # whether replicas send weights

    def wire_shapes(self) -> list[tf.TensorShape]:
        """Returns the shapes of values [rows, ...] and indices [rows]."""
        return [tf.TensorShape([None, *self.shape[1:]]), tf.TensorShape([None])]

    def state_shapes(self) -> list[tf.TensorShape]:
        """Returns the shapes of the state."""
        lists = [tf.TensorShape([]), tf.TensorShape([])]
        return lists + [tf.TensorShape([None])] * self.weighs

    @property
    def sum_dtype(self) -> tf.DType:
        """Dtype of the values in the state."""
        return sum_dtype_of(self.dtype) if self.accumulator is None else self.dtype

    def zeros(self) -> list[tf.Tensor]:
        """Returns the state before the first replica."""
        lists = [
            tf.raw_ops.EmptyTensorList(
                element_shape=shape, max_num_elements=-1, element_dtype=dtype
            )
            for shape, dtype in self._listed
        ]
        return lists + [tf.zeros([0], tf.float64)] * self.weighs

    def add(
        self,
        state: Sequence[tf.Tensor],
        sent: Sequence[tf.Tensor],
        before: tf.Tensor | None,
        factor: tf.Tensor | None,
    ) -> list[tf.Tensor]:
        """Returns the state after one more replica, values and indices.

        ``factor`` is its factor, ``before`` multiplies those of earlier replicas.
        """
        lists = [
            tf.raw_ops.TensorListPushBack(input_handle=own, tensor=more)
            for own, more in zip(state[:2], sent, strict=True)
        ]
        factors = [tf.concat([own * before, [factor]], axis=0) for own in state[2:]]
        return lists + factors

    def mean(
        self,
        state: Sequence[tf.Tensor],
        count: tf.Tensor,
        divisor: tf.Tensor,
    ) -> tf.IndexedSlices:
        """Returns the mean over ``count`` replicas, or over those touching each row."""
        lists, factors = state[:2], state[2:]
        if self.accumulator is not None:
            return self._mean_by_row(lists, count)
        (values, rows), (indices, _) = (
            tf.raw_ops.TensorListConcatV2(
                input_handle=own,
                element_dtype=dtype,
                element_shape=shape,
                leading_dims=tf.zeros([0], tf.int64),
            )
            for own, (shape, dtype) in zip(lists, self._listed, strict=True)
        )
        for own in factors:
            values = self._weighed(values, own, rows)
        mean = values / tf.cast(divisor, values.dtype)
        return self._slices(tf.cast(mean, self.dtype), indices)

    def _weighed(
        self, values: tf.Tensor, factors: tf.Tensor, rows: tf.Tensor
    ) -> tf.Tensor:
        """Multiplies each replica's rows by its factor, if any is not 1."""

        def multiply() -> tf.Tensor:  # A factor of 0 gives 0, even for NaN.
            of_rows = tf.repeat(tf.cast(factors, values.dtype), rows)
            width = [1] * (len(self.shape) - 1)
            return tf.math.multiply_no_nan(values, tf.reshape(of_rows, [-1, *width]))

        are_alike = tf.reduce_all(tf.equal(factors, 1))
        return tf.cond(are_alike, lambda: tf.identity(values), multiply)

    @property
    def _listed(self) -> list[tuple[list[int], tf.DType]]:
        """Shapes and dtypes of both lists' elements; -1: any number of rows."""
        return [([-1, *self.shape[1:]], self.sum_dtype), ([-1], self.index_dtype)]

    def clear(self) -> list[tf.Operation]:
        """Returns the ops that empty the accumulator."""
        if self.accumulator is None:
            return []
        nothing = tf.zeros([1, *self.shape[1:]], self.dtype)
        with tf.control_dependencies([self._put(nothing, tf.constant([0]))]):
            return [self.accumulator.take_indexed_slices_grad(1).values.op]

    def _mean_by_row(
        self, lists: Sequence[tf.Tensor], count: tf.Tensor
    ) -> tf.IndexedSlices:
        put: list[tf.Operation] = []
        # The accumulator's handle is a reference, which a loop cannot hold.
        for slot in range(self.slots):
            values, indices = (
                tf.raw_ops.TensorListGetItem(
                    input_handle=own,
                    index=tf.minimum(slot, count - 1),
                    element_shape=shape,
                    element_dtype=dtype,
                )
                for own, (shape, dtype) in zip(lists, self._listed, strict=True)
            )
            step = tf.where(slot < count, tf.constant(_FRESH, tf.int64), _STALE)
            with tf.control_dependencies(put):
                put = [self._put(values, indices, step)]
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
    weighs: bool,
) -> RowSums:
    """Makes the sums of one sparse gradient; call in ``detached_scope``."""
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
        weighs=weighs,
    )


def sum_dtype_of(dtype: Any) -> tf.DType:
    """Returns the dtype that gradients are added in: float32 for narrower floats."""
    dtype = tf.as_dtype(dtype)
    is_narrow = dtype.is_floating and dtype.size < tf.float32.size
    return tf.float32 if is_narrow else dtype

"""What one replica sends to one server, and how several replicas' are added up.

Dense gradients travel in packs. A sparse one travels as values and indices, and several
replicas' become one by ``sparse_mean``: "replicas" divides the sum by the number of
replicas, as for dense gradients, so that a row that one of two replicas touched counts
half. "per_row" divides each row by the number of replicas that touched it, as
TensorFlow's class does, and uses TensorFlow's accumulator, so that repeated indices in
one gradient count as they do there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._transfer.packs import Pack, plan_packs

SPARSE_MEANS = ("replicas", "per_row")

# Local steps of gradients that an accumulator always, and never, takes for fresh.
_FRESH = 2**62
_STALE = -1


@dataclass(frozen=True)
class SyncOptions:
    """How gradients travel, and how many make a step.

    Attributes:
      aggregate: gradients that make a step.
      total: replicas.
      below_bytes: a smaller tensor travels in a pack with others.
      wire_dtype: what wider floats are pushed as, or None.
      sparse_mean: one of SPARSE_MEANS.
    """

    aggregate: int
    total: int
    below_bytes: int
    wire_dtype: tf.DType | None
    sparse_mean: str


@dataclass(frozen=True)
class RowSums:
    """One sparse gradient.

    While replicas are added, its state is three tensors: the values and the
    indices of all replicas, concatenated, and the number of rows of each.

    Attributes:
      index: its place in the caller's list.
      dtype: of the values.
      index_dtype: of the indices.
      shape: of the variable.
      slots: the largest number of replicas that may be added.
      accumulator: TensorFlow's, where each row is counted by itself, else None.
    """

    index: int
    dtype: tf.DType
    index_dtype: tf.DType
    shape: tuple[int, ...]
    slots: int
    accumulator: Any = None

    def wire_shapes(self) -> list[tf.TensorShape]:
        """Returns the shapes of values [rows, ...] and indices [rows]."""
        return [tf.TensorShape([None, *self.shape[1:]]), tf.TensorShape([None])]

    def state_shapes(self) -> list[tf.TensorShape]:
        """Returns the shapes of the state."""
        return [*self.wire_shapes(), tf.TensorShape([None])]

    def zeros(self) -> list[tf.Tensor]:
        """Returns the state before the first replica."""
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
        """Returns the mean over ``count`` replicas (int32 []), or over each row's."""
        if self.accumulator is not None:
            return self._mean_by_row(state, count)
        values, indices, _ = state
        return self._slices(values / tf.cast(count, values.dtype), indices)

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
        # The accumulator's handle is a reference, which no loop can hold.
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


@dataclass(frozen=True)
class Payload:
    """Packs of dense gradients, then values and indices of each sparse one.

    Sums have one tensor per pack, then the state of each ``RowSums``.

    Attributes:
      packs: of dense gradients.
      rows: one per sparse gradient.
      wire_dtype: what wider floats are cast to on their way, or None.
    """

    packs: tuple[Pack, ...]
    rows: tuple[RowSums, ...]
    wire_dtype: tf.DType | None

    def dtypes(self) -> list[tf.DType]:
        """Returns the dtypes of the tensors that travel."""
        found = [tf.as_dtype(pack.dtype) for pack in self.packs]
        for row in self.rows:
            found += [row.dtype, row.index_dtype]
        return [self._on_wire(dtype) for dtype in found]

    def encode(self, grads: Mapping[int, Any]) -> list[tf.Tensor]:
        """Returns the tensors that travel for gradients by index."""
        tensors = [pack.join(grads) for pack in self.packs]
        for row in self.rows:
            tensors += [grads[row.index].values, grads[row.index].indices]
        return [
            tf.cast(tensor, dtype)
            for tensor, dtype in zip(tensors, self.dtypes(), strict=True)
        ]

    def encode_nothing(self) -> list[tf.Tensor]:
        """Returns tensors for a ticket that brings no gradient."""
        return [tf.zeros([0], dtype) for dtype in self.dtypes()]

    def zeros(self) -> list[tf.Tensor]:
        """Returns the sums before the first replica."""
        sums = [tf.zeros([], pack.dtype) for pack in self.packs]
        return sums + [part for row in self.rows for part in row.zeros()]

    def sum_shapes(self) -> list[tf.TensorShape]:
        """Returns what is known of the sums' shapes while they are added."""
        shapes = [tf.TensorShape(None) for _ in self.packs]
        return shapes + [shape for row in self.rows for shape in row.state_shapes()]

    def add(
        self, sums: Sequence[tf.Tensor], sent: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the sums with what one more replica sent."""
        totals, arrived = iter(sums), iter(sent)
        added = [
            next(totals) + _widened(next(arrived), pack.dtype, pack.shape)
            for pack in self.packs
        ]
        for row in self.rows:
            state = [next(totals) for _ in row.state_shapes()]
            values_shape, indices_shape = row.wire_shapes()
            values = _widened(next(arrived), row.dtype, values_shape)
            indices = _widened(next(arrived), row.index_dtype, indices_shape)
            added += row.add(state, values, indices)
        return added

    def means(self, sums: Sequence[tf.Tensor], count: tf.Tensor) -> dict[int, Any]:
        """Returns mean gradients by index.

        Args:
          sums: of ``count`` replicas.
          count: int32 [], at least 1.
        """
        totals = iter(sums)
        found: dict[int, Any] = {}
        for pack in self.packs:
            total = next(totals)
            mean = total / tf.cast(count, total.dtype)
            found |= pack.cut(tf.ensure_shape(mean, pack.shape))
        for row in self.rows:
            state = [next(totals) for _ in row.state_shapes()]
            found[row.index] = row.mean(state, count)
        return found

    def clear(self) -> list[tf.Operation]:
        """Returns the ops that drop what an interrupted chief left half added."""
        return [op for row in self.rows for op in row.clear()]

    def _on_wire(self, dtype: tf.DType) -> tf.DType:
        wire = self.wire_dtype
        is_narrower = wire is not None and dtype.is_floating and dtype.size > wire.size
        return wire if is_narrower else dtype


def make_payloads(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    options: SyncOptions,
    *,
    shared_name: str,
) -> dict[str, Payload]:
    """Plans what a replica sends to each parameter server.

    Args:
      grads: [N] dense, sparse or None, of their variables' shapes; None does not
        travel.
      variables: [N] that they belong to; a gradient goes where its variable lives.
      options: how gradients travel.
      shared_name: prefix of the accumulators' names; to be called in
        ``detached_scope``.

    Returns:
      Payloads by server.
    """
    dense: dict[int, tf.Variable] = {}
    rows: dict[str, list[RowSums]] = {}
    for n, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if isinstance(grad, tf.IndexedSlices):
            sums = _make_row_sums(n, grad, variable, options, shared_name=shared_name)
            rows.setdefault(variable.device, []).append(sums)
        elif grad is not None:
            dense[n] = variable
    packs = plan_packs(dense, below_bytes=options.below_bytes)
    return {
        server: Payload(
            tuple(pack for pack in packs if pack.server == server),
            tuple(rows.get(server, ())),
            options.wire_dtype,
        )
        for server in dict.fromkeys([*(pack.server for pack in packs), *rows])
    }


def _make_row_sums(
    index: int,
    grad: tf.IndexedSlices,
    variable: tf.Variable,
    options: SyncOptions,
    *,
    shared_name: str,
) -> RowSums:
    """Makes the sums of one sparse gradient, in ``detached_scope``."""
    accumulator = None
    if options.sparse_mean == "per_row":
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
        slots=options.aggregate,
        accumulator=accumulator,
    )


def _widened(tensor: tf.Tensor, dtype: Any, shape: Any) -> tf.Tensor:
    tensor.set_shape(shape)
    return tf.cast(tensor, dtype)

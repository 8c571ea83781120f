"""What one replica sends to one server, and how several replicas' are added up.

Dense gradients travel in packs. Of a sparse one, the values travel alone, and the
indices of all with the ticket. Several replicas' become one by ``sparse_mean``:
"replicas" divides the sum by the number of replicas, as for dense gradients, so that a
row that one of two replicas touched counts half. "per_row" divides each row by the
number of replicas that touched it, as TensorFlow's class does, and uses TensorFlow's
accumulator, so that repeated indices in one gradient count as they do there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._transfer.packs import Pack, holds_bytes, plan_packs, with_head

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
      is_elastic: whether a round may go on without replicas that do not arrive.
    """

    aggregate: int
    total: int
    below_bytes: int
    wire_dtype: tf.DType | None
    sparse_mean: str
    is_elastic: bool = False


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

    The ticket travels as the head of a pack. Where no pack can take it, or there are
    indices, it travels with these as one vector of whole numbers.

    Sums have one tensor per pack, then the state of each ``RowSums``. What a head adds
    up to goes with its pack's sum, and is cut off with the means.

    Attributes:
      packs: of dense gradients.
      rows: one per sparse gradient.
      wire_dtype: what wider floats are cast to on their way, or None.
      ticket_size: how many numbers a ticket has.
    """

    packs: tuple[Pack, ...]
    rows: tuple[RowSums, ...]
    wire_dtype: tf.DType | None
    ticket_size: int

    def dtypes(self) -> list[tf.DType]:
        """Returns the dtypes of what has arrived: of packs, values and indices."""
        found = [self._on_wire(pack.dtype) for pack in self.packs]
        for row in self.rows:
            found += [self._on_wire(row.dtype), row.index_dtype]
        return found

    def encode(self, ticket: tf.Tensor, grads: Mapping[int, Any]) -> list[tf.Tensor]:
        """Returns the tensors that travel.

        Args:
          ticket: int64 [ticket_size].
          grads: by index.
        """
        packed = [
            pack.join(grads, ticket if pack.numbers else None) for pack in self.packs
        ]
        found = [grads[row.index] for row in self.rows]
        sent = [*packed, *(rows.values for rows in found)]
        sent = [tf.cast(tensor, self._on_wire(tensor.dtype)) for tensor in sent]
        if self._carrier is not None:
            return sent
        indices = [tf.cast(rows.indices, tf.int64) for rows in found]
        return [tf.concat([ticket, *indices], axis=0), *sent]

    def decode(self, sent: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Undoes ``encode``, but for the packs, on the current device.

        Returns:
          The ticket, and what has arrived with it, of the ``dtypes``.
        """
        carrier = self._carrier
        if carrier is not None:
            return carrier.read_head(sent[self.packs.index(carrier)]), list(sent)
        numbers, *arrived = sent
        if not self.rows:
            return numbers, arrived
        arrived, values = arrived[: len(self.packs)], arrived[len(self.packs) :]
        sizes = [self.ticket_size, *(tf.shape(rows)[0] for rows in values)]
        ticket, *indices = tf.split(numbers, sizes)
        for row, *rows in zip(self.rows, values, indices, strict=True):
            arrived += [rows[0], tf.cast(rows[1], row.index_dtype)]
        return ticket, arrived

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

    @property
    def _carrier(self) -> Pack | None:
        """The pack that the ticket travels with."""
        return next((pack for pack in self.packs if pack.numbers), None)

    def _on_wire(self, dtype: Any) -> tf.DType:
        dtype, wire = tf.as_dtype(dtype), self.wire_dtype
        is_narrower = wire is not None and dtype.is_floating and dtype.size > wire.size
        return wire if is_narrower else dtype


def make_payloads(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    options: SyncOptions,
    *,
    ticket_size: int,
    shared_name: str,
) -> dict[str, Payload]:
    """Plans what a replica sends to each parameter server.

    Args:
      grads: [N] dense, sparse or None, of their variables' shapes; None does not
        travel.
      variables: [N] that they belong to; a gradient goes where its variable lives.
      options: how gradients travel.
      ticket_size: how many numbers a ticket has.
      shared_name: prefix of the accumulators' names; to be called in
        ``detached_scope``.

    Returns:
      Payloads by server.
    """
    dense: dict[int, tf.Variable] = {}
    rows: dict[str, list[RowSums]] = {}
    for n, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if isinstance(grad, tf.IndexedSlices):
            added = _make_row_sums(n, grad, variable, options, shared_name=shared_name)
            rows.setdefault(variable.device, []).append(added)
        elif grad is not None:
            dense[n] = variable
    planned = plan_packs(dense, below_bytes=options.below_bytes)
    payloads = {}
    for server in dict.fromkeys([*(pack.server for pack in planned), *rows]):
        packs = tuple(pack for pack in planned if pack.server == server)
        sums = tuple(rows.get(server, ()))
        if not sums and holds_bytes(options.wire_dtype or tf.float32):
            packs = with_head(packs, numbers=ticket_size, server=server)
        payloads[server] = Payload(packs, sums, options.wire_dtype, ticket_size)
    return payloads


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

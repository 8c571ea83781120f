"""What one replica sends to one server, and how several replicas' are added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._transfer.packs import Pack, plan_packs
from tw_syncrep._transfer.row_sums import RowSums, make_row_sums

SPARSE_MEANS = ("replicas", "per_row")


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
      shared_name: prefix of the accumulators' names.

    Returns:
      Payloads by server.
    """
    dense: dict[int, tf.Variable] = {}
    rows: dict[str, list[RowSums]] = {}
    for n, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if isinstance(grad, tf.IndexedSlices):
            by_row = options.sparse_mean == "per_row"
            sums = make_row_sums(
                n,
                grad,
                variable,
                slots=options.aggregate,
                accumulator_name=f"{shared_name}/rows_{n}" if by_row else None,
            )
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


def _widened(tensor: tf.Tensor, dtype: Any, shape: Any) -> tf.Tensor:
    tensor.set_shape(shape)
    return tf.cast(tensor, dtype)

"""What one replica sends to one server, and how several replicas' are added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._transfer.packing import join, take_apart
from tw_syncrep._transfer.packs import Pack
from tw_syncrep._transfer.row_sums import RowSums


@dataclass(frozen=True)
class Payload:
    """Packs of dense gradients, then values and indices of each sparse one.

    Attributes:
      packs: of dense gradients.
      rows: one a sparse gradient.
      wire_dtype: what wider floats are cast to on their way, or None.
    """

    packs: tuple[Pack, ...]
    rows: tuple[RowSums, ...]
    wire_dtype: tf.DType | None

    def dtypes(self) -> list[tf.DType]:
        """Returns the types of the tensors that travel."""
        found = [self._wire(pack.dtype) for pack in self.packs]
        for row in self.rows:
            found += [self._wire(row.dtype), tf.as_dtype(row.index_dtype)]
        return found

    def of(self, grads: Mapping[int, Any]) -> list[tf.Tensor]:
        """Returns the tensors that travel for gradients by index."""
        tensors = [join(pack, grads) for pack in self.packs]
        for row in self.rows:
            tensors += [grads[row.index].values, grads[row.index].indices]
        return [
            tf.cast(tensor, dtype)
            for tensor, dtype in zip(tensors, self.dtypes(), strict=True)
        ]

    def of_nothing(self) -> list[tf.Tensor]:
        """Returns tensors for a ticket that brings no gradient."""
        return [tf.zeros([0], dtype) for dtype in self.dtypes()]

    def start(self) -> list[tf.Tensor]:
        """Returns the sums of no replica: a zero a pack, and no rows."""
        sums = [tf.zeros([], pack.dtype) for pack in self.packs]
        return sums + [part for row in self.rows for part in row.start()]

    def sum_shapes(self) -> list[tf.TensorShape]:
        """Returns what is known of the sums' shapes while they are added."""
        shapes = [tf.TensorShape(None) for _ in self.packs]
        return shapes + [shape for row in self.rows for shape in row.state_shapes()]

    def add(
        self, sums: Sequence[tf.Tensor], sent: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the sums with what one more replica sent."""
        dense = len(self.packs)
        added = [
            total + self._widen(tensor, pack.dtype, _shape(pack))
            for total, tensor, pack in zip(sums, sent, self.packs, strict=False)
        ]
        for place, row in enumerate(self.rows):
            state = sums[dense + 3 * place : dense + 3 * place + 3]
            values, indices = sent[dense + 2 * place : dense + 2 * place + 2]
            values_shape, indices_shape = row.wire_shapes()
            values = self._widen(values, row.dtype, values_shape)
            indices = self._widen(indices, row.index_dtype, indices_shape)
            added += row.add(state, values, indices)
        return added

    def means(self, sums: Sequence[tf.Tensor], count: tf.Tensor) -> dict[int, Any]:
        """Returns mean gradients by index.

        Args:
          sums: of ``count`` replicas.
          count: int32 [], at least 1.
        """
        dense = len(self.packs)
        found: dict[int, Any] = {}
        for pack, total in zip(self.packs, sums, strict=False):
            mean = total / tf.cast(count, total.dtype)
            found |= take_apart(pack, tf.ensure_shape(mean, _shape(pack)))
        for place, row in enumerate(self.rows):
            state = sums[dense + 3 * place : dense + 3 * place + 3]
            found[row.index] = row.mean(state, count)
        return found

    def forget(self) -> list[tf.Operation]:
        """Returns ops that drop what an interrupted chief left half added."""
        return [op for row in self.rows for op in row.forget()]

    def _wire(self, dtype: str) -> tf.DType:
        own, wire = tf.as_dtype(dtype), self.wire_dtype
        narrows = wire is not None and own.is_floating and own.size > wire.size
        return wire if narrows else own

    def _widen(self, tensor: tf.Tensor, dtype: str, shape: tf.TensorShape) -> tf.Tensor:
        tensor.set_shape(shape)
        return tf.cast(tensor, dtype)


def _shape(pack: Pack) -> tf.TensorShape:
    if pack.is_alone:
        return tf.TensorShape(pack.pieces[0].shape)
    return tf.TensorShape([sum(piece.size for piece in pack.pieces)])

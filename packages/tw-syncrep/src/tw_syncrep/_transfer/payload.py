"""The data that one replica sends to one server, and how replicas' data are added up.

Dense gradients are sent in packs, the values of a sparse gradient alone, and the
indices of all sparse gradients with the ticket.

Gradients are sent unweighted, and a replica's weight in its ticket. Weights are
measured in a unit: the first replica's, so that equal weights are exactly 1 and change
no bit; once a weight differs, the power of two below the unit, so that whole numbers
stay exact. A server multiplies only by factors other than 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core.internal import power_of_two, weigh
from tw_syncrep._parameters.packs import Pack, holds_bytes, plan_packs, with_head
from tw_syncrep._transfer.rows import RowSums, make_row_sums, sum_dtype_of


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are sent, and how many make a step."""

    aggregate: int  # number of gradients per step
    total: int  # number of replicas
    below_bytes: int  # smaller tensors are sent in packs
    wire_dtype: tf.DType | None  # wider floats are cast to it in transit
    sparse_mean: str  # one of SPARSE_MEANS
    is_elastic: bool = False  # whether rounds may go on without missing replicas
    weighs: bool = False  # whether replicas send weights


@dataclass(frozen=True)
class Payload:
    """Packs of dense gradients, then values and indices of each sparse one.

    The ticket is sent as the head of a pack. If no pack can take it, or there are
    indices, it is sent with these as one vector of integers.

    Sums are, if replicas send weights, the weights' total and its unit; then one tensor
    per pack and the state of each ``RowSums``. The sum of the heads is part of its
    pack's sum, and is cut off with the means.
    """

    packs: tuple[Pack, ...]
    rows: tuple[RowSums, ...]
    wire_dtype: tf.DType | None
    ticket_size: int  # number of integers
    weighs: bool = False

    def dtypes(self) -> list[tf.DType]:
        """Returns the dtypes of the decoded tensors: packs, values and indices."""
        found = [self._on_wire(pack.dtype) for pack in self.packs]
        for row in self.rows:
            found += [self._on_wire(row.dtype), row.index_dtype]
        return found

    def encode(self, ticket: tf.Tensor, grads: Mapping[int, Any]) -> list[tf.Tensor]:
        """Returns the tensors to send; the ticket is int64 [ticket_size]."""
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
        """Returns the ticket and the tensors, packs unopened, on the current device."""
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

    def zeros(self) -> list[tf.Tensor]:
        """Returns the sums before the first replica."""
        sums = [tf.zeros([2], tf.float64)] * self.weighs
        sums += [tf.zeros([], sum_dtype_of(pack.dtype)) for pack in self.packs]
        return sums + [part for row in self.rows for part in row.zeros()]

    def sum_shapes(self) -> list[tf.TensorShape]:
        """Returns the sums' static shapes while they are being added."""
        shapes = [tf.TensorShape([2])] * self.weighs
        shapes += [tf.TensorShape(None) for _ in self.packs]
        return shapes + [shape for row in self.rows for shape in row.state_shapes()]

    def add(
        self,
        sums: Sequence[tf.Tensor],
        sent: Sequence[tf.Tensor],
        weight: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Adds one replica's tensors to the sums, by its weight, float64 []."""
        totals, arrived = iter(sums), iter(sent)
        added: list[tf.Tensor] = []
        before = factor = None
        if self.weighs:
            total, before, factor = _add_weight(next(totals), weight)
            added.append(total)
        for pack in self.packs:
            own = _widened(next(arrived), sum_dtype_of(pack.dtype), pack.shape)
            added.append(_weighed(next(totals), before) + _weighed(own, factor))
        for row in self.rows:
            state = [next(totals) for _ in row.state_shapes()]
            values_shape, indices_shape = row.wire_shapes()
            values = _widened(next(arrived), row.sum_dtype, values_shape)
            indices = _widened(next(arrived), row.index_dtype, indices_shape)
            added += row.add(state, [values, indices], before, factor)
        return added

    def means(self, sums: Sequence[tf.Tensor], count: tf.Tensor) -> dict[int, Any]:
        """Returns mean gradients by index; 0 if all weights are 0."""
        totals = iter(sums)
        divisor = count
        if self.weighs:
            total = next(totals)[0]
            divisor = tf.where(tf.equal(total, 0), tf.cast(count, tf.float64), total)
        found: dict[int, Any] = {}
        for pack in self.packs:
            total = next(totals)
            mean = tf.cast(total / tf.cast(divisor, total.dtype), pack.dtype)
            found |= pack.cut(tf.ensure_shape(mean, pack.shape))
        for row in self.rows:
            state = [next(totals) for _ in row.state_shapes()]
            found[row.index] = row.mean(state, count, divisor)
        return found

    def clear(self) -> list[tf.Operation]:
        """Returns the ops that drop sums that an interrupted chief left incomplete."""
        return [op for row in self.rows for op in row.clear()]

    @property
    def _carrier(self) -> Pack | None:
        """The pack whose head is the ticket, if any."""
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
    first: str,
    ticket_size: int,
    shared_name: str,
) -> dict[str, Payload]:
    """Plans a replica's payloads by server; call in ``detached_scope``.

    The ``first`` server has one even if no gradient goes there.
    """
    dense: dict[int, tf.Variable] = {}
    rows: dict[str, list[RowSums]] = {}
    for n, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if isinstance(grad, tf.IndexedSlices):
            added = make_row_sums(
                n,
                grad,
                variable,
                slots=options.aggregate,
                sparse_mean=options.sparse_mean,
                shared_name=shared_name,
                weighs=options.weighs,
            )
            rows.setdefault(variable.device, []).append(added)
        elif grad is not None:
            dense[n] = variable
    planned = plan_packs(dense, below_bytes=options.below_bytes)
    payloads = {}
    for server in dict.fromkeys([first, *(pack.server for pack in planned), *rows]):
        packs = tuple(pack for pack in planned if pack.server == server)
        sums = tuple(rows.get(server, ()))
        if not sums and holds_bytes(options.wire_dtype or tf.float32):
            packs = with_head(packs, numbers=ticket_size, server=server)
        payloads[server] = Payload(
            packs, sums, options.wire_dtype, ticket_size, options.weighs
        )
    return payloads


def _widened(tensor: tf.Tensor, dtype: Any, shape: Any) -> tf.Tensor:
    tensor.set_shape(shape)
    return tf.cast(tensor, dtype)


def _add_weight(
    so_far: tf.Tensor, weight: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Adds a weight, float64 [], to the total (in units) and its unit, float64 [2].

    Also returns the factor for the sums so far, since the unit may change, and the
    weight in units.
    """
    total, unit = tf.unstack(so_far)
    unit = tf.where(total > 0, unit, weight)
    is_other = tf.logical_and(tf.not_equal(weight, unit), tf.not_equal(weight, 0))
    new = tf.where(is_other, power_of_two(unit), unit)
    before = tf.where(is_other, unit / new, tf.ones_like(unit))
    share = tf.math.divide_no_nan(weight, new)
    return tf.stack([total * before + share, new]), before, share


def _weighed(tensor: tf.Tensor, factor: tf.Tensor | None) -> tf.Tensor:
    """Multiplies gradients by a factor; a factor of 0 gives 0, even for NaN."""
    if factor is None:
        return tensor
    return tf.cond(
        tf.equal(factor, 1),
        lambda: tf.identity(tensor),
        lambda: weigh(tensor, factor),
    )

"""Sorts what an optimizer computed into what travels, and how."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import on_device
from tw_syncrep._transfer.packs import Piece, plan_packs, servers_of
from tw_syncrep._transfer.payload import Payload
from tw_syncrep._transfer.row_sums import RowSums

SPARSE_MEANS = ("replicas", "per_row")


def make_payloads(
    grads: Sequence[Any],
    variables: Sequence[tf.Variable],
    *,
    below: int,
    wire_dtype: tf.DType | None,
    sparse_mean: str,
    slots: int,
    shared_name: str,
) -> dict[str, Payload]:
    """Plans what a replica sends to each parameter server.

    Args:
      grads: [N] dense, sparse or None, of their variables' shapes; None travels
        nowhere.
      variables: [N] they belong to; a gradient goes where its variable lives.
      below: bytes of a tensor that travels in a pack with others.
      wire_dtype: what wider floats are cast to on their way, or None.
      sparse_mean: one of SPARSE_MEANS.
      slots: gradients of a variable that are added, at most.
      shared_name: prefix of the accumulators' names.

    Returns:
      Payloads by server.
    """
    pieces: list[Piece] = []
    rows: dict[str, list[RowSums]] = {}
    for n, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if isinstance(grad, tf.IndexedSlices):
            named = f"{shared_name}/rows_{n}" if sparse_mean == "per_row" else None
            sums = _rows(grad, variable, n, slots, accumulator_name=named)
            rows.setdefault(variable.device, []).append(sums)
        elif grad is not None:
            pieces.append(_piece(n, grad, variable))
    packs = plan_packs(pieces, below=below)
    return {
        server: Payload(
            tuple(pack for pack in packs if pack.server == server),
            tuple(rows.get(server, ())),
            wire_dtype,
        )
        for server in dict.fromkeys([*servers_of(packs), *rows])
    }


def _piece(index: int, grad: tf.Tensor, variable: tf.Variable) -> Piece:
    return Piece(
        index=index,
        server=variable.device,
        dtype=grad.dtype.name,
        shape=tuple(variable.shape.as_list()),
        itemsize=grad.dtype.size,
    )


def _rows(
    grad: tf.IndexedSlices,
    variable: tf.Variable,
    index: int,
    slots: int,
    *,
    accumulator_name: str | None,
) -> RowSums:
    accumulator = None
    if accumulator_name is not None:
        accumulator = _accumulator(grad, variable, accumulator_name)
    return RowSums(
        index=index,
        dtype=grad.values.dtype.name,
        index_dtype=grad.indices.dtype.name,
        shape=tuple(variable.shape.as_list()),
        slots=slots,
        accumulator=accumulator,
    )


def _accumulator(
    grad: tf.IndexedSlices, variable: tf.Variable, shared_name: str
) -> tf.compat.v1.SparseConditionalAccumulator:
    with on_device(variable.device):
        return tf.compat.v1.SparseConditionalAccumulator(
            grad.values.dtype, shape=(), shared_name=shared_name, name="rows"
        )

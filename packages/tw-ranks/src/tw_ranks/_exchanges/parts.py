"""Exchanges of parts, each owned by one rank: reduce-scatter, all-to-all, all-gather.

A reduce-scatter and an all-gather together send as much as an all-reduce, which
consists of the same two halves; between them each rank can work on the sum of its own
part. After an all-to-all it adds the parts itself.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import without_autograph
from tw_ranks._agreement import Exchange, TensorSpec, describe_tensor
from tw_ranks._endpoint.endpoint import Endpoint
from tw_ranks._exchanges.collectives import (
    add_to_owners,
    check_dtypes,
    join_of_owners,
    swap,
)
from tw_ranks._exchanges.running import run_collectives

_WIDE = ("float32", "float64")
_FLOATS = (*_WIDE, "float16", "bfloat16")
_WORDS = ("int32", "int64")


@without_autograph
def reduce_scatter_parts(
    parts: Sequence[Any], endpoint: Endpoint, *, name: str
) -> tf.Tensor:
    """Adds each rank's part; see ``ProcessGroup.reduce_scatter``."""
    known = [tf.convert_to_tensor(part) for part in parts]
    check_dtypes(known, _WIDE)
    lengths = _lengths_of(known, endpoint)
    if endpoint.size == 1 or not sum(lengths):
        return known[endpoint.rank]
    flat = tf.concat(known, axis=0)
    (own,) = run_collectives(
        lambda brought, keys: [add_to_owners(brought[0], lengths, endpoint, keys[0])],
        [flat],
        specs=[tf.TensorSpec([None], flat.dtype)],
        endpoint=endpoint,
        exchange=_describe("a reduce-scatter", flat.dtype, lengths, name),
    )
    return tf.ensure_shape(own, [lengths[endpoint.rank]])


@without_autograph
def all_gather_parts(
    own: Any, lengths: Sequence[int], endpoint: Endpoint, *, name: str
) -> list[tf.Tensor]:
    """Returns every rank's part; see ``ProcessGroup.all_gather``."""
    own, lengths = tf.convert_to_tensor(own), tuple(lengths)
    check_dtypes([own], (*_FLOATS, *_WORDS))
    if len(lengths) != endpoint.size or own.shape.as_list() != [lengths[endpoint.rank]]:
        raise ValueError(
            f"lengths must hold {endpoint.size}, one per rank, and at index "
            f"{endpoint.rank} that of own, of shape {own.shape}; got {list(lengths)}."
        )
    if endpoint.size == 1 or not sum(lengths):
        return [own] * endpoint.size
    (joined,) = run_collectives(
        lambda brought, keys: [join_of_owners(brought[0], lengths, endpoint, keys[0])],
        [own],
        specs=[tf.TensorSpec([None], own.dtype)],
        endpoint=endpoint,
        exchange=_describe("an all-gather", own.dtype, lengths, name),
    )
    return list(tf.split(tf.ensure_shape(joined, [sum(lengths)]), list(lengths)))


@without_autograph
def all_to_all_rows(rows: Any, endpoint: Endpoint, *, name: str) -> tf.Tensor:
    """Sends row r to rank r; see ``ProcessGroup.all_to_all``."""
    rows = tf.convert_to_tensor(rows)
    check_dtypes([rows], (*_WIDE, *_WORDS))
    shape = rows.shape
    if shape.rank != 2 or not shape.is_fully_defined() or shape[0] != endpoint.size:
        raise ValueError(
            f"rows must be a matrix of known shape, with {endpoint.size} rows, one per "
            f"rank; got shape {shape}."
        )
    if endpoint.size == 1 or not shape[1]:
        return rows
    (got,) = run_collectives(
        lambda brought, keys: [swap(brought[0], endpoint, keys[0], has_elements=True)],
        [rows],
        endpoint=endpoint,
        exchange=Exchange("an all-to-all", (describe_tensor(rows, name),)),
    )
    return got


def _lengths_of(parts: Sequence[tf.Tensor], endpoint: Endpoint) -> tuple[int, ...]:
    shapes = [part.shape for part in parts]
    are_flat = all(shape.rank == 1 and shape.is_fully_defined() for shape in shapes)
    if len(parts) != endpoint.size or not are_flat:
        raise ValueError(
            f"parts must be {endpoint.size} flat tensors of known lengths, one per "
            f"rank; got shapes {[str(shape) for shape in shapes]}."
        )
    return tuple(shape[0] for shape in shapes)


def _describe(
    kind: str, dtype: tf.DType, lengths: Sequence[int], name: str
) -> Exchange:
    tensor = TensorSpec(name, dtype.name, (sum(lengths),))
    return Exchange(kind, (tensor,), (("lengths", str(list(lengths))),))

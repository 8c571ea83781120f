"""The exchanges of ranks in a step, and how gradients are sent.

A rank without a batch knows shapes and dtypes, and sends zeros.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_builders.internal import RankShards
from tw_core.internal import join_rows, map_values, values_of, with_unique_rows
from tw_keras._updates.update import Brought

NARROW = ("float16", "bfloat16")
Like = tuple[Any, tf.DType, tf.DType | None]  # shape, dtype, dtype of indices


@dataclass(frozen=True)
class SumExchange:
    """A sum of a synchronised layer, as it was last built."""

    place: str
    like: Sequence[Like]


@dataclass(frozen=True)
class _Update:
    """An update, as it was last built."""

    place: int  # of the optimizer
    brought: Sequence[Brought]  # [K]
    used: Sequence[int]  # places of the gradients that are not None
    averages: bool

    @property
    def variables(self) -> list[Any]:
        """Tower 0's variables that have a gradient."""
        return [self.brought[0].variables[n] for n in self.used]


@dataclass(frozen=True)
class UpdateExchange(_Update):
    """The gradients that an update exchanges."""

    counts: Sequence[int]  # of the parts in which each gradient is sent
    like: Sequence[Like]  # of the parts
    unique: Sequence[bool]  # whether ranks repeat no row of a part


@dataclass(frozen=True)
class _OfShards(_Update):
    """An update of variables whose state is in shards over the ranks."""

    shards: RankShards

    @property
    def places(self) -> list[int]:
        """The places of its variables among those of the shards."""
        return [self.shards.place_of(own) for own in self.variables]


@dataclass(frozen=True)
class ShardedExchange(_OfShards, UpdateExchange):
    """An update whose dense gradients are sent to the ranks with their shards."""


class AccumulatedExchange(_Update):
    """An update whose gradients are accumulated, and exchanged when it is due."""


class RememberedExchange(AccumulatedExchange):
    """An update by a reducer with memory, which sends compressed gradients."""


@dataclass(frozen=True)
class AccumulatedShardsExchange(_OfShards, AccumulatedExchange):
    """An update whose gradients are accumulated, and sent to shards when it is due."""


class OverTowersExchange(AccumulatedExchange):
    """An update by an optimizer over towers that accumulates."""


Exchange = SumExchange | UpdateExchange | AccumulatedExchange


def name_of(variable: Any) -> str:
    """Returns the name under which a variable is exchanged."""
    return str(getattr(variable, "path", variable.name))


def unnumbered(name: str) -> str:
    """Returns a name without the numbers that Keras and scopes count per process."""
    return re.sub(r"(_\d+)+\b", "", name)


def make_parts(exchange: AccumulatedExchange) -> list[list[tf.Tensor]]:
    """Returns the zeros that the towers of a rank without a batch accumulate."""
    zeros = [
        to_travel(tf.zeros(v.shape, tf.as_dtype(v.dtype)), v, True)
        for v in exchange.variables
    ]
    return [zeros] * len(exchange.brought)


def to_travel(grad: Any, variable: Any, has_same_rows: bool) -> Any:
    """Prepares a gradient of a tower for the sum over ranks."""
    if has_same_rows:  # a table that every tower and rank reads in the same order
        grad = tf.convert_to_tensor(grad)
    if tf.is_tensor(grad) and not isinstance(grad, tf.IndexedSlices):
        with tf.device(grad.device):  # The shape is needed without a batch, too.
            grad = tf.ensure_shape(grad, variable.shape)
    if values_of(grad).dtype.name in NARROW:  # a sum times rows may overflow
        return map_values(lambda values: tf.cast(values, tf.float32), grad)
    return grad


def describe(grad: Any) -> tuple[Any, tf.DType, tf.DType | None]:
    """Returns the shape and dtype of a tensor, and of its indices."""
    if isinstance(grad, tf.IndexedSlices):
        return [0, *grad.values.shape[1:]], grad.values.dtype, grad.indices.dtype
    return grad.shape, grad.dtype, None


def make_zeros(shape: Any, dtype: tf.DType, indices: tf.DType | None) -> Any:
    """Returns the zeros that a rank without a batch sends."""
    values = tf.zeros(shape, dtype)
    if indices is None:
        return values
    return tf.IndexedSlices(values, tf.zeros([0], indices))


def flatten(tensors: Sequence[Any]) -> list[Any]:
    """Lists dense tensors, and values and indices of sparse ones."""
    parts = [
        [own.values, own.indices] if isinstance(own, tf.IndexedSlices) else [own]
        for own in tensors
    ]
    return [part for own in parts for part in own]


def unflatten(flat: Sequence[Any], are_sparse: Sequence[bool]) -> list[Any]:
    """Undoes ``flatten``."""
    parts = iter(flat)
    return [
        tf.IndexedSlices(next(parts), next(parts)) if is_sparse else next(parts)
        for is_sparse in are_sparse
    ]


def divided(grad: Any, weight: tf.Tensor) -> Any:
    """Divides a gradient; the quotient by 0 is 0."""

    def divide(values: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(values, tf.cast(weight, values.dtype))

    return map_values(divide, grad)


def joined(
    parts: Sequence[Any], counts: Sequence[int], unique: Sequence[bool]
) -> list[Any]:
    """Joins the reduced parts of gradients."""
    whole = iter(
        with_unique_rows(part) if is_unique else part
        for part, is_unique in zip(parts, unique, strict=True)
    )
    return [join_rows([next(whole) for _ in range(n)]) for n in counts]


def for_towers(
    reduced: Sequence[Sequence[Any]], exchange: UpdateExchange | AccumulatedExchange
) -> list[Brought]:
    """Replaces the towers' gradients by reduced ones, [K][N] or [1][N] for all."""
    variables = exchange.brought[0].variables
    rows = []
    for own in reduced:
        grads: list[Any] = [None] * len(variables)
        for n, grad in zip(exchange.used, own, strict=True):
            grads[n] = _as_of(variables[n], grad)
        rows.append(grads)
    if len(rows) == 1:
        rows *= len(exchange.brought)
    pairs = zip(rows, exchange.brought, strict=True)
    return [Brought(grads, own.variables) for grads, own in pairs]


def _as_of(variable: Any, grad: Any) -> Any:
    """Gives a gradient the dtype and, where it is sparse, the shape of a variable."""
    values = tf.cast(values_of(grad), tf.as_dtype(variable.dtype))
    if not isinstance(grad, tf.IndexedSlices):
        return values
    return tf.IndexedSlices(values, grad.indices, tf.constant(list(variable.shape)))


def check_all_or_none(active: tf.Tensor, size: int) -> tf.Operation:
    """Fails if some, but not all, of the ranks that share data have no batch left."""
    says = (
        "TowerModel: with data='shared' all ranks must get the same batches; the "
        "data of some ranks has ended. Give all ranks the same data, or use "
        "data='own'. Ranks with a batch:"
    )
    good = tf.reduce_any(tf.equal(active, [0.0, float(size)]))
    return tf.debugging.Assert(good, [says, active])


def check_same(checksums: tf.Tensor) -> tf.Operation:
    """Fails if ranks that must have equal batches have different ones."""
    some = tf.boolean_mask(checksums, checksums > 0)
    same = tf.reduce_all(tf.equal(some, some[:1]))
    says = (
        "TowerModel: with data='shared' all ranks must get the same batches; the first "
        "ones of an epoch differ. Give all ranks one order and one seed, or use "
        "data='own'. Checksums by rank:"
    )
    return tf.debugging.Assert(same, [says, checksums], summarize=1 << 10)

"""One exchange of gradients: the collective that carries each, and the ops."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import tensorflow as tf

from tw_core.gradients import sum_duplicate_rows
from tw_core.internal import (
    ALONE_BYTES,
    PackPlan,
    has_unique_rows,
    is_gathered,
    join_rows,
    map_values,
    pack_tensors,
    plan_packing,
    power_of_two,
    split_rows,
    unpack_tensors,
    values_of,
    weigh,
    weight_dtype,
)
from tw_ranks._agreement import GRADIENTS, Exchange, TensorSpec, describe_tensor
from tw_ranks._endpoint.endpoint import Endpoint
from tw_ranks._exchanges.collectives import (
    NARROW,
    add_narrow,
    add_up,
    combine_flat,
    gather,
    gather_rows,
    known_shape,
    row_spec,
)
from tw_ranks._exchanges.running import run_collectives


@dataclass(frozen=True)
class Manner:
    """How gradients are added, the same on all ranks."""

    wire_dtype: str | None = None  # Narrow, in which wider floats are sent.
    divides: bool = False  # Sums are divided by the number of ranks.
    weighs: bool = False  # Narrow gradients are weighted where they are added.

    @property
    def gathers_weights(self) -> bool:
        """Whether ranks gather all weights; otherwise a weight is in a pack."""
        return self.weighs or self.wire_dtype is not None

    def describe(self) -> tuple[tuple[str, str], ...]:
        """Returns the options of an ``Exchange``."""
        return tuple((name, str(value)) for name, value in asdict(self).items())

    @classmethod
    def read(cls, exchange: Exchange) -> "Manner":
        """Reads the options of an ``Exchange``."""
        options = dict(exchange.options)
        wire, divides, weighs = (options[field.name] for field in fields(cls))
        return cls(
            None if wire == "None" else wire, divides == "True", weighs == "True"
        )


@dataclass(frozen=True)
class ExchangePlan:
    """How each gradient is sent."""

    dense: tuple[int, ...]  # Positions of the dense gradients, last first.
    sparse: tuple[int, ...]  # Likewise.
    packs: PackPlan  # Of the dense gradients, then the weight.
    manner: Manner


def narrow_dtype(dtype: tf.DType, wire: str | None) -> tf.DType | None:
    """Returns the narrow dtype in which gradients are sent; None for their own."""
    if dtype.name in NARROW:
        return dtype
    return tf.as_dtype(wire) if wire is not None and dtype.is_floating else None


def exchange_gradients(
    local: Sequence[Any],
    weight: tf.Tensor,
    endpoint: Endpoint,
    names: Sequence[str],
    manner: Manner,
    *,
    by_nccl: bool | None = None,
) -> tuple[list[Any], tf.Tensor]:
    """Returns the sums or means of [N] gradients and the weight, [1], of all ranks.

    Rows that no rank repeats are not repeated in the result.
    """
    parts = [split_rows(grad) for grad in local]
    counts = [len(own) for own in parts]
    names = [name for name, n in zip(names, counts, strict=False) for _ in range(n)]
    flat = [part for own in parts for part in own]
    reduced, total = _exchange_parts(flat, weight, endpoint, names, manner, by_nccl)
    whole = iter(
        _add_rows(part) if endpoint.size > 1 and has_unique_rows(own) else part
        for part, own in zip(reduced, flat, strict=True)
    )
    return [join_rows([next(whole) for _ in range(n)]) for n in counts], total


def _add_rows(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds rows that several ranks have, in float32 where they are narrower."""
    dtype = grad.values.dtype
    wide = tf.float32 if dtype.name in NARROW else dtype
    values = tf.cast(grad.values, wide)
    added = sum_duplicate_rows(tf.IndexedSlices(values, grad.indices))
    return tf.IndexedSlices(
        tf.cast(added.values, dtype), added.indices, grad.dense_shape
    )


def _exchange_parts(
    local: Sequence[Any],
    weight: tf.Tensor,
    endpoint: Endpoint,
    names: Sequence[str],
    manner: Manner,
    by_nccl: bool | None,
) -> tuple[list[Any], tf.Tensor]:
    plan = _plan(local, manner)
    manner, wire = plan.manner, plan.manner.wire_dtype
    if endpoint.size == 1:
        share = tf.math.divide_no_nan(weight, weight)[0]
        narrow = [narrow_dtype(g.dtype, wire) for g in local]
        return [
            weigh(grad, share) if manner.weighs and dtype else grad
            for grad, dtype in zip(local, narrow, strict=True)
        ], weight
    dense = [*(local[n] for n in plan.dense), weight]
    packed = pack_tensors(dense, plan.packs)
    rows = [part for n in plan.sparse for part in (local[n].values, local[n].indices)]
    # The endpoint keeps the functions below, which must not keep the tensors' graph.
    count, shapes = len(packed), [tensor.shape for tensor in dense]

    def unpack(results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return unpack_tensors(results[:count], plan.packs, shapes)

    got = run_collectives(
        lambda brought, keys: _body(brought, keys, count, plan, endpoint),
        [*packed, *rows],
        specs=[
            *(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in packed),
            *map(row_spec, rows),
        ],
        endpoint=endpoint,
        exchange=_describe(local, manner, names),
        find_weight=lambda results: unpack(results)[-1],
        by_nccl=by_nccl,
    )
    *parts, total = unpack(got)
    reduced: dict[int, Any] = dict(zip(plan.dense, parts, strict=True))
    joined = got[count:]
    for n, values, indices in zip(plan.sparse, joined[::2], joined[1::2], strict=True):
        reduced[n] = tf.IndexedSlices(values, indices, local[n].dense_shape)
    if manner.divides and not manner.gathers_weights:  # Its pack was divided.
        total *= endpoint.size
    if manner.weighs:
        spread = _in_units(total, total)[0]
        reduced = {n: _divide_narrow(g, spread, wire) for n, g in reduced.items()}
    return [reduced[n] for n in range(len(local))], total


def _divide_narrow(grad: Any, weight: tf.Tensor, wire: str | None) -> Any:
    """Divides a narrow gradient by the weight of its sum; others were not weighted."""

    def divide(values: tf.Tensor) -> tf.Tensor:
        if narrow_dtype(values.dtype, wire) is None:
            return values
        wide = tf.cast(values, tf.float32)
        return tf.cast(tf.math.divide_no_nan(wide, weight), values.dtype)

    return map_values(divide, grad)


def _in_units(weights: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Divides weights by the least power of two that is not below their total.

    Then no sum overflows, and no sum of whole numbers is rounded.
    """
    total = tf.cast(total, tf.float64)
    unit = power_of_two(total)
    unit = tf.where(unit < total, 2 * unit, unit)
    return tf.cast(
        tf.math.divide_no_nan(tf.cast(weights, tf.float64), unit), tf.float32
    )


def _plan(local: Sequence[Any], manner: Manner) -> ExchangePlan:
    order = range(len(local) - 1, -1, -1)
    dense = tuple(n for n in order if not isinstance(local[n], tf.IndexedSlices))
    sparse = tuple(n for n in order if isinstance(local[n], tf.IndexedSlices))
    keys = [_pack_key(local[n]) for n in dense]
    has_narrow = any(narrow_dtype(g.dtype, manner.wire_dtype) for g in local)
    manner = replace(manner, weighs=manner.weighs and has_narrow)
    of_weight = weight_dtype(local).name
    packs = plan_packing([*keys, None if manner.gathers_weights else of_weight])
    return ExchangePlan(dense, sparse, packs, manner)


def _pack_key(tensor: tf.Tensor) -> str | None:
    """Returns the key that a pack's tensors share; None for one that is sent alone."""
    elements = tensor.shape.num_elements()
    if not elements or elements * tensor.dtype.size >= ALONE_BYTES:
        return None
    return str(tensor.dtype.name)


def _describe(local: Sequence[Any], manner: Manner, names: Sequence[str]) -> Exchange:
    specs = []
    for grad, name in zip(local, names or [""] * len(local), strict=True):
        is_sparse = isinstance(grad, tf.IndexedSlices)
        indices = grad.indices.dtype.name if is_sparse else ""
        values = values_of(grad)
        specs.append(describe_tensor(values, name, has_rows=is_sparse, indices=indices))
    return Exchange(GRADIENTS, tuple(specs), manner.describe())


def follow_exchange(exchange: Exchange, endpoint: Endpoint, graph: tf.Graph) -> None:
    """Builds an exchange of other ranks' training step; adds it to ``built.of_steps``.

    ``graph`` must be the same one for all exchanges that this rank follows.
    """
    if exchange.kind != GRADIENTS:
        raise RuntimeError(
            f"finish: other ranks have reached {exchange.kind!r}, in which a rank "
            "without data cannot take part; let all ranks do it before their first "
            "batch, or end the run on all ranks with until_first_end."
        )
    names = [spec.name for spec in exchange.tensors]
    with graph.as_default():
        local = [_placeholder(spec) for spec in exchange.tensors]
        dtype = weight_dtype(local)
        weight = tf.compat.v1.placeholder(dtype, [1])
        known = endpoint.keys.num_agreed
        while endpoint.keys.num_agreed == known:  # A step may have several of one kind.
            exchange_gradients(
                *(local, weight, endpoint, names, Manner.read(exchange)),
                by_nccl=exchange.by_nccl,
            )


def _placeholder(spec: TensorSpec) -> Any:
    values = tf.compat.v1.placeholder(spec.dtype, spec.shape)
    if not spec.indices:
        return values
    indices = tf.compat.v1.placeholder(spec.indices, [None])
    return tf.IndexedSlices(values, indices)


def _body(
    brought: list[tf.Tensor],
    keys: list[int],
    num_packed: int,
    plan: ExchangePlan,
    endpoint: Endpoint,
) -> list[tf.Tensor]:
    """Builds the collectives of one exchange; see the diagram in ``reduction.py``."""
    dense, rows = brought[:num_packed], brought[num_packed:]
    shares, total = None, []
    if plan.manner.gathers_weights:
        *dense, weight = dense
        weights = gather(weight, endpoint, keys[num_packed - 1])
        # Not reduce_sum, which starts from 0.0: a rank that is done has weight -0.0.
        total = [tf.add_n(tf.split(weights, endpoint.size))]
        if plan.manner.weighs:
            shares = tf.unstack(_in_units(weights, total[0]), endpoint.size)
    sums = _Sums(plan.manner, endpoint, shares)
    results = [sums.of(t, key) for t, key in zip(dense, keys, strict=False)] + total
    own_keys = keys[num_packed::2]
    for values, indices, key in zip(rows[::2], rows[1::2], own_keys, strict=True):
        results += sums.of_rows(values, indices, key)
    return results


@dataclass(frozen=True)
class _Sums:
    """The sums of one exchange."""

    manner: Manner
    endpoint: Endpoint
    shares: Sequence[tf.Tensor] | None  # By rank, for narrow gradients.

    def of(self, tensor: tf.Tensor, key: int) -> tf.Tensor:
        elements = known_shape(tensor, self.endpoint).num_elements()
        if elements == 0:  # TensorFlow's ring does not take empty tensors.
            return tensor
        if elements is not None and not narrow_dtype(
            tensor.dtype, self.manner.wire_dtype
        ):
            num_bytes = elements * tensor.dtype.size
            is_small = is_gathered(num_bytes, self.endpoint.size)
            if is_small and self.endpoint.mpi is None:
                return self._gather_and_add(tensor, key)
            return self._add(tensor, key)
        # A length not known before is zero on a rank that is done.
        return combine_flat(
            tensor, self._add, self.endpoint, key, to=GRADIENTS, skips_empty=True
        )

    def of_rows(
        self, values: tf.Tensor, indices: tf.Tensor, key: int
    ) -> list[tf.Tensor]:
        narrow, size = (
            narrow_dtype(values.dtype, self.manner.wire_dtype),
            self.endpoint.size,
        )
        sent = [tf.cast(values, narrow or values.dtype), indices]
        joined, places, counts = gather_rows(sent, self.endpoint, key)
        joined = tf.cast(joined, values.dtype)
        if self.shares is not None and narrow is not None:
            own = tf.split(joined, counts, num=size)
            own = [weigh(part, s) for part, s in zip(own, self.shares, strict=True)]
            joined = tf.ensure_shape(tf.concat(own, axis=0), joined.shape)
        return [joined / size if self.manner.divides else joined, places]

    def _add(self, flat: tf.Tensor, key: Any) -> tf.Tensor:
        narrow, divides = (
            narrow_dtype(flat.dtype, self.manner.wire_dtype),
            self.manner.divides,
        )
        if narrow is None:
            return add_up(flat, self.endpoint, key, "Add", divides=divides)
        return add_narrow(
            flat, narrow, self.endpoint, key, divides=divides, weights=self.shares
        )

    def _gather_and_add(self, tensor: tf.Tensor, key: int) -> tf.Tensor:
        """Adds after gathering: half as many messages, each with a whole tensor."""
        gathered = gather(tensor[tf.newaxis], self.endpoint, key)
        summed = tf.add_n(tf.unstack(gathered, num=self.endpoint.size))
        return summed / self.endpoint.size if self.manner.divides else summed

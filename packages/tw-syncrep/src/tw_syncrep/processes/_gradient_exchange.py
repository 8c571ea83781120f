"""One exchange of gradients: the collective that carries each, and the ops."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core import flat_packs
from tw_core.flat_packs import PackPlan
from tw_core.gradients import map_values, power_of_two, values_of, weigh
from tw_syncrep.processes._agreement import GRADIENTS, Exchange, TensorSpec
from tw_syncrep.processes._collectives import (
    add_up,
    compare_shapes,
    find_bucket,
    gather,
    gather_rows,
    pad,
    run_collectives,
    swap,
)
from tw_syncrep.processes._group import ProcessGroup

NARROW = ("float16", "bfloat16")
"""Floats that are added in float32."""

_ALONE_BYTES = 1 << 21
_GATHERED_BYTES = 1 << 16
"""Up to this many received bytes, gathering all tensors is faster than a reduction."""


@dataclass(frozen=True)
class ExchangePlan:
    """How each gradient travels."""

    dense: tuple[int, ...]  # Positions of the dense gradients, last first.
    sparse: tuple[int, ...]  # Likewise.
    packs: PackPlan  # Of the dense gradients, then the weight.
    wire: str | None  # Narrow dtype in which wider floats travel.
    divides: bool  # Sums are divided by the number of ranks.
    weighs: bool  # Narrow gradients are weighed where they are added.

    @property
    def gathers_weights(self) -> bool:
        """Whether all ranks get the weight of each; otherwise it is in a pack."""
        return self.weighs or self.wire is not None


def narrow_dtype(dtype: tf.DType, wire: str | None) -> tf.DType | None:
    """Returns the narrow dtype in which gradients travel; None for their own."""
    if dtype.name in NARROW:
        return dtype
    return tf.as_dtype(wire) if wire is not None and dtype.is_floating else None


def plan_exchange(
    local: Sequence[Any], wire: str | None, *, divides: bool, weighs: bool
) -> ExchangePlan:
    order = range(len(local) - 1, -1, -1)
    dense = tuple(n for n in order if not isinstance(local[n], tf.IndexedSlices))
    sparse = tuple(n for n in order if isinstance(local[n], tf.IndexedSlices))
    keys = [_pack_key(local[n]) for n in dense]
    dtypes = [values_of(grad).dtype for grad in local]
    weighs = weighs and any(narrow_dtype(dtype, wire) for dtype in dtypes)
    is_alone = weighs or wire is not None
    packs = flat_packs.plan_packs([*keys, None if is_alone else "float32"])
    return ExchangePlan(dense, sparse, packs, wire, divides, weighs)


def _pack_key(tensor: tf.Tensor) -> str | None:
    """Returns the key that a pack's tensors share; None for one that travels alone."""
    elements = tensor.shape.num_elements()
    if not elements or elements * tensor.dtype.size >= _ALONE_BYTES:
        return None
    return str(tensor.dtype.name)


def exchange_gradients(
    local: Sequence[Any],
    weight: tf.Tensor,
    plan: ExchangePlan,
    group: ProcessGroup,
    names: Sequence[str],
) -> tuple[list[Any], tf.Tensor]:
    if group.size == 1:
        share = tf.math.divide_no_nan(weight, weight)[0]
        narrow = [narrow_dtype(values_of(g).dtype, plan.wire) for g in local]
        return [
            weigh(grad, share) if plan.weighs and dtype else grad
            for grad, dtype in zip(local, narrow, strict=True)
        ], weight
    dense = [*(local[n] for n in plan.dense), weight]
    packed = flat_packs.pack(dense, plan.packs)
    rows = [part for n in plan.sparse for part in _parts(local[n])]
    specs = [
        *(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in packed),
        *(tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in rows),
    ]
    got = run_collectives(
        lambda brought, keys: _body(brought, keys, plan, group),
        [*packed, *rows],
        specs,
        group=group,
        exchange=_describe(local, plan, names),
        find_weight=lambda results: _unpack(results, plan, dense)[-1],
    )
    *parts, total = _unpack(got, plan, dense)
    reduced: dict[int, Any] = dict(zip(plan.dense, parts, strict=True))
    for place, n in enumerate(plan.sparse):
        values, indices = got[len(packed) + 2 * place : len(packed) + 2 * place + 2]
        reduced[n] = tf.IndexedSlices(values, indices, local[n].dense_shape)
    if plan.divides and not plan.gathers_weights:  # Its pack was divided.
        total *= group.size
    if plan.weighs:
        spread = _in_units(total, total)[0]

        def divide(values: tf.Tensor) -> tf.Tensor:
            if narrow_dtype(values.dtype, plan.wire) is None:
                return values
            wide = tf.cast(values, tf.float32)
            return tf.cast(tf.math.divide_no_nan(wide, spread), values.dtype)

        reduced = {n: map_values(divide, grad) for n, grad in reduced.items()}
    return [reduced[n] for n in range(len(local))], total


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


def _unpack(
    results: Sequence[tf.Tensor], plan: ExchangePlan, dense: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    count = len(plan.packs.packs) + len(plan.packs.alone)
    shapes = [tensor.shape for tensor in dense]
    return flat_packs.unpack(results[:count], plan.packs, shapes)


def _parts(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    return slices.values, slices.indices


def _describe(
    local: Sequence[Any], plan: ExchangePlan, names: Sequence[str]
) -> Exchange:
    specs = []
    for n, grad in enumerate(local):
        values = values_of(grad)
        shape = None if values.shape.rank is None else tuple(values.shape.as_list())
        indices = grad.indices.dtype.name if isinstance(grad, tf.IndexedSlices) else ""
        if indices and shape is not None:
            shape = (None, *shape[1:])
        name = names[n] if names else ""
        specs.append(TensorSpec(name, values.dtype.name, shape, indices))
    options = (
        ("wire_dtype", str(plan.wire)),
        ("divides", str(plan.divides)),
        ("weighs", str(plan.weighs)),
    )
    return Exchange(GRADIENTS, tuple(specs), options)


def follow_exchange(exchange: Exchange, group: ProcessGroup, graph: tf.Graph) -> None:
    """Builds an exchange of other ranks' training step; adds it to ``group.of_step``.

    ``graph`` must be the same one for all exchanges that this rank follows.
    """
    if exchange.kind != GRADIENTS:
        raise RuntimeError(
            f"finish: other ranks have come to {exchange.kind!r}, in which a rank "
            "without data cannot take part; have all ranks do it before their first "
            "batch, or end the run for all with until_first_end."
        )
    options = dict(exchange.options)
    wire = None if options["wire_dtype"] == "None" else options["wire_dtype"]
    names = [spec.name for spec in exchange.tensors]
    with graph.as_default():
        local = [_placeholder(spec) for spec in exchange.tensors]
        weight = tf.compat.v1.placeholder(tf.float32, [1])
        plan = plan_exchange(
            local,
            wire,
            divides=options["divides"] == "True",
            weighs=options["weighs"] == "True",
        )
        known = group.num_agreed
        while group.num_agreed == known:  # A step may have several of one kind.
            exchange_gradients(local, weight, plan, group, names)


def _placeholder(spec: TensorSpec) -> Any:
    values = tf.compat.v1.placeholder(spec.dtype, spec.shape)
    if not spec.indices:
        return values
    indices = tf.compat.v1.placeholder(spec.indices, [None])
    return tf.IndexedSlices(values, indices)


def _body(
    brought: list[tf.Tensor], keys: list[int], plan: ExchangePlan, group: ProcessGroup
) -> list[tf.Tensor]:
    """Builds the collectives of one exchange; see the diagram in ``_reducer.py``."""
    count = len(plan.packs.packs) + len(plan.packs.alone)
    dense, rows = brought[:count], brought[count:]
    shares, total = None, []
    if plan.gathers_weights:
        *dense, weight = dense
        weights = gather(weight, group, keys[count - 1])
        # Not reduce_sum, which starts from 0.0: a rank that is done weighs -0.0.
        total = [tf.add_n(tf.split(weights, group.size))]
        if plan.weighs:
            shares = tf.unstack(_in_units(weights, total[0]), group.size)
    results = [
        _sum_dense(tensor, key, plan, group, shares)
        for tensor, key in zip(dense, keys, strict=False)
    ] + total
    for values, indices, key in zip(rows[::2], rows[1::2], keys[count::2], strict=True):
        results += _join_rows(values, indices, key, plan, group, shares)
    return results


def _join_rows(
    values: tf.Tensor,
    indices: tf.Tensor,
    key: int,
    plan: ExchangePlan,
    group: ProcessGroup,
    shares: Sequence[tf.Tensor] | None,
) -> list[tf.Tensor]:
    narrow = narrow_dtype(values.dtype, plan.wire)
    sent = [tf.cast(values, narrow or values.dtype), indices]
    joined, places, counts = gather_rows(sent, group, key)
    joined = tf.cast(joined, values.dtype)
    if shares is not None and narrow is not None:
        own = tf.split(joined, counts, num=group.size)
        own = [weigh(part, s) for part, s in zip(own, shares, strict=True)]
        joined = tf.ensure_shape(tf.concat(own, axis=0), joined.shape)
    return [joined / group.size if plan.divides else joined, places]


def _sum_dense(
    tensor: tf.Tensor,
    key: Any,
    plan: ExchangePlan,
    group: ProcessGroup,
    shares: Sequence[tf.Tensor] | None,
) -> tf.Tensor:
    elements = tensor.shape.num_elements()
    if elements == 0:  # TensorFlow's ring does not take empty tensors.
        return tensor
    if elements is None:
        return _sum_padded(tensor, key, plan, group, shares)
    if (narrow := narrow_dtype(tensor.dtype, plan.wire)) is not None:
        return _sum_narrow(tensor, key, plan, group, narrow, shares)
    size = elements * tensor.dtype.size
    if size * (group.size - 1) <= _GATHERED_BYTES:
        return _gather_and_add(tensor, key, plan, group)
    return add_up(tensor, group, key, "Add", divides=plan.divides)


def _sum_padded(
    tensor: tf.Tensor,
    key: int,
    plan: ExchangePlan,
    group: ProcessGroup,
    shares: Sequence[tf.Tensor] | None,
) -> tf.Tensor:
    """Adds tensors of a length not known before, which is zero on a rank that is done.

    Ranks exchange lengths and pad to the bucket of the largest, which has its own keys.
    """
    flat = tf.reshape(tensor, [-1])
    longest = compare_shapes(tensor, group, key, to=GRADIENTS, skips_empty=True)
    bucket = find_bucket(longest)
    padded = pad(flat, bucket)
    first = key + 1 + 2 * bucket
    narrow = narrow_dtype(tensor.dtype, plan.wire)
    if narrow is None:
        summed = add_up(padded, group, first, "Add", divides=plan.divides)
    else:
        summed = _sum_narrow(padded, first, plan, group, narrow, shares)
    result = tf.reshape(summed[: tf.size(flat)], tf.shape(tensor))
    return tf.ensure_shape(result, tensor.shape)


def _gather_and_add(
    tensor: tf.Tensor, key: Any, plan: ExchangePlan, group: ProcessGroup
) -> tf.Tensor:
    """Adds after gathering: half as many messages, each with a whole tensor."""
    gathered = gather(tensor[tf.newaxis], group, key)
    summed = tf.add_n(tf.unstack(gathered, num=group.size))
    return summed / group.size if plan.divides else summed


def _sum_narrow(
    tensor: tf.Tensor,
    key: Any,
    plan: ExchangePlan,
    group: ProcessGroup,
    wire: tf.DType,
    shares: Sequence[tf.Tensor] | None,
) -> tf.Tensor:
    """Adds tensors that travel in a narrow dtype: each rank adds a part in float32.

    Gradients times their weights may overflow the narrow dtype, so the weights are
    applied in float32, too.
    """
    sent = tf.cast(tf.reshape(tensor, [-1]), wire)
    size = tf.shape(sent)[0]
    filled = tf.pad(sent, [[0, -size % group.size]])
    parts = swap(tf.reshape(filled, [group.size, -1]), group, key)
    wide = [tf.cast(part, tf.float32) for part in tf.unstack(parts, num=group.size)]
    if shares is not None:
        wide = [weigh(part, s) for part, s in zip(wide, shares, strict=True)]
    added = tf.add_n(wide)
    if plan.divides:
        added /= group.size
    shares = tf.tile(tf.cast(added, wire)[tf.newaxis], [group.size, 1])
    summed = tf.reshape(swap(shares, group, key + 1), [-1])[:size]
    result = tf.reshape(tf.cast(summed, tensor.dtype), tf.shape(tensor))
    return tf.ensure_shape(result, tensor.shape)

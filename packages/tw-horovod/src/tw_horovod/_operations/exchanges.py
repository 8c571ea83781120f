"""Exchanges of tensors of any dtype, without gradients, for Horovod's ops.

TensorFlow's collectives support few dtypes. Tensors to add travel as the next wider
dtype that is supported; tensors that are only moved, as one with the same bits.

    added    uint8 int8 uint16 int16 -> int32, float16 bfloat16: a part on each rank,
             in float32
    moved    uint8 int8 bool -> float16, which holds their values; uint16 int16 -> the
             bits of float16
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core import flat_packs
from tw_horovod._operations.reductions import Average, Max, Min, Product, ReduceOp, Sum
from tw_ranks import ProcessGroup
from tw_ranks.internal import (
    BUCKETS,
    KEYS_PER_TENSOR,
    Exchange,
    add_up,
    check_dtypes,
    combine_flat,
    compare_shapes,
    describe_tensor,
    find_bucket,
    gather,
    gather_rows,
    known_shape,
    row_spec,
    run_collectives,
    swap,
)

_MERGES = {Average: "Add", Sum: "Add", Min: "Min", Max: "Max", Product: "Mul"}
_NARROW = ("float16", "bfloat16")
_WIDE = dict.fromkeys(("uint8", "int8", "uint16", "int16"), tf.int32) | dict.fromkeys(
    _NARROW, tf.float32
)
_REDUCED = ("int32", "int64", "float32", "float64", *_WIDE)
_AS_VALUES = ("uint8", "int8", "bool")
_AS_BITS = {"uint16": tf.float16, "int16": tf.float16}
_MOVED = ("int32", "int64", "float32", "float64", *_NARROW, *_AS_VALUES, *_AS_BITS)


def reduce(
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    *,
    group: ProcessGroup,
    scales: tuple[float, float] = (1.0, 1.0),
    name: str = "",
) -> list[tf.Tensor]:
    """Reduces tensors of the same shapes and dtypes over all ranks, element-wise.

    ``scales`` multiply before and after. Means of integers are rounded towards zero.
    Ranks match the exchange by ``name``; by program order if it is "".
    """
    check_dtypes(tensors, _REDUCED)
    wide = [scaled(_widened(t), scales[0]) for t in tensors]
    if group.size > 1:
        options = (("op", op.name), *_describe_scales(scales))
        described = tuple(map(describe_tensor, tensors))
        exchange = Exchange("an allreduce", described, options, name)
        wide = _reduce_packs(tensors, wide, op, group, exchange)
    return [
        _finished(reduced, op, scales[1], group, tensor.dtype)
        for reduced, tensor in zip(wide, tensors, strict=True)
    ]


def gather_all(
    tensors: Sequence[tf.Tensor], *, group: ProcessGroup, name: str = ""
) -> list[tf.Tensor]:
    """Joins [R, ...] of every rank in rank order; R may differ by tensor and rank."""
    _check_rows(tensors)
    if group.size == 1 or not tensors:
        return list(tensors)
    carried = [_carried(tensor) for tensor in tensors]

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        pairs = zip(brought, keys, strict=True)
        return [_gather(rows, group, key) for rows, key in pairs]

    gathered = run_collectives(
        body,
        carried,
        specs=[row_spec(t) for t in carried],
        group=group,
        exchange=Exchange(
            "an allgather",
            tuple(describe_tensor(t, has_rows=True) for t in tensors),
            name=name,
        ),
    )
    return [_restored(g, t.dtype) for g, t in zip(gathered, tensors, strict=True)]


def deal(
    rows: tf.Tensor, counts: tf.Tensor, *, group: ProcessGroup, name: str = ""
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends each rank its rows, those for rank 0 first; ``counts`` is int32 [size].

    Returns the rows sent to this rank, those of rank 0 first, and their counts.
    """
    _check_rows([rows])
    if group.size == 1:
        return rows, counts
    carried = _carried(rows)

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        (rows, counts), key = brought, keys[0]
        inner = known_shape(rows, group)[1:]
        rows = _compared(rows, inner, "an alltoall", group, keys[1])
        received = swap(tf.reshape(counts, [group.size, 1]), group, key)[:, 0]
        longest = add_up(tf.reduce_max(counts, keepdims=True), group, key + 1, "Max")
        bucket = find_bucket(longest[0])
        length = tf.gather(BUCKETS, bucket)
        blocks = swap(_blocks(rows, counts, length), group, key + 2 + bucket)
        kept = tf.sequence_mask(received, length)
        return [tf.boolean_mask(blocks, kept), received]

    got, received = run_collectives(
        body,
        [carried, counts],
        specs=[row_spec(carried), tf.TensorSpec([group.size], tf.int32)],
        group=group,
        exchange=Exchange(
            "an alltoall", (describe_tensor(rows, has_rows=True),), name=name
        ),
    )
    return _restored(got, rows.dtype), received


def reduce_shares(
    tensor: tf.Tensor,
    op: ReduceOp,
    *,
    group: ProcessGroup,
    scales: tuple[float, float],
    name: str = "",
) -> tf.Tensor:
    """Reduces [R, ...] to row shares; the first ``R % size`` ranks get one more row."""
    check_dtypes([tensor], _REDUCED)
    _check_rows([tensor])
    wide = scaled(_widened(tensor), scales[0])
    if group.size == 1:
        return _finished(wide, op, scales[1], group, tensor.dtype)
    is_narrow = tensor.dtype.name in _NARROW
    sent = tf.cast(wide, tensor.dtype) if is_narrow else wide

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        [rows], [key] = brought, keys
        rows = _compared(rows, tensor.shape, "a reducescatter", group, key)
        counts = count_shares(tf.shape(rows)[0], group.size)
        bucket = find_bucket(counts[0])
        blocks = _blocks(rows, counts, tf.gather(BUCKETS, bucket))
        blocks = _widened(swap(blocks, group, key + 1 + bucket))
        total = tf.reduce_sum(blocks, axis=0)[: counts[group.rank]]
        if op is Average and total.dtype.is_floating:
            total /= group.size
        return [tf.cast(total, rows.dtype)]

    [share] = run_collectives(
        body,
        [sent],
        specs=[row_spec(sent)],
        group=group,
        exchange=Exchange(
            "a reducescatter",
            (describe_tensor(tensor),),
            (("op", op.name), *_describe_scales(scales)),
            name,
        ),
    )
    share = _finished(_widened(share), op, scales[1], group, tensor.dtype)
    rows = tensor.shape.as_list()[0]
    if rows is None:
        return share
    own = rows // group.size + (group.rank < rows % group.size)
    return tf.ensure_shape(share, [own, *tensor.shape[1:]])


def count_shares(rows: tf.Tensor, size: int) -> tf.Tensor:
    """Returns how many of ``rows`` each rank gets, int32 [size]; the first get more."""
    return rows // size + tf.cast(tf.range(size) < rows % size, tf.int32)


def scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Multiplies a tensor; integers are rounded towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.name in _NARROW:
        return tf.cast(scaled(_widened(tensor), factor), tensor.dtype)
    if tensor.dtype.is_floating:
        return tensor * tf.constant(factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def _widened(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, _WIDE.get(tensor.dtype.name, tensor.dtype))


def _finished(
    wide: tf.Tensor, op: ReduceOp, factor: float, group: ProcessGroup, dtype: tf.DType
) -> tf.Tensor:
    """Scales a reduced tensor; integer means have not been divided yet."""
    if op is Average and not wide.dtype.is_floating:
        factor /= group.size
    return tf.cast(scaled(wide, factor), dtype)


def _reduce_packs(
    tensors: Sequence[tf.Tensor],
    wide: Sequence[tf.Tensor],
    op: ReduceOp,
    group: ProcessGroup,
    exchange: Exchange,
) -> list[tf.Tensor]:
    """Reduces tensors in one pack per dtype; means of floats are divided."""
    narrow = [
        t.dtype if t.dtype.name in _NARROW and _MERGES[op] == "Add" else None
        for t in tensors
    ]
    plan = flat_packs.plan_packs(
        [
            (t.dtype, n) if t.shape.is_fully_defined() else None
            for t, n in zip(wide, narrow, strict=True)
        ]
    )
    packed = flat_packs.pack(wide, plan)
    firsts = [*(own[0] for own in plan.packs), *plan.alone]

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        return [
            _combine(t, op, narrow[n], group, key)
            for t, n, key in zip(brought, firsts, keys, strict=True)
        ]

    got = run_collectives(
        body,
        packed,
        group=group,
        exchange=exchange,
    )
    return flat_packs.unpack(got, plan, [t.shape for t in wide])


def _combine(
    tensor: tf.Tensor, op: ReduceOp, narrow: Any, group: ProcessGroup, key: Any
) -> tf.Tensor:
    divides = op is Average and tensor.dtype.is_floating

    def combine(flat: tf.Tensor, key: Any) -> tf.Tensor:
        if narrow is None:
            return add_up(flat, group, key, _MERGES[op], divides=divides)
        return _add_parts(flat, narrow, group, key, divides)

    return combine_flat(tensor, combine, group, key, to="an allreduce")


def _add_parts(
    flat: tf.Tensor, narrow: tf.DType, group: ProcessGroup, key: Any, divides: bool
) -> tf.Tensor:
    """Adds in ``flat``'s dtype, a part on each rank, but transfers as ``narrow``."""
    size = tf.size(flat)
    sent = tf.pad(tf.cast(flat, narrow), [[0, -size % group.size]])
    swapped = swap(tf.reshape(sent, [group.size, -1]), group, key)
    total = tf.reduce_sum(tf.cast(swapped, flat.dtype), axis=0)
    if divides:
        total /= group.size
    gathered = gather(tf.cast(total, narrow), group, key + 1)
    return tf.cast(tf.slice(gathered, [0], [size]), flat.dtype)


def _gather(rows: tf.Tensor, group: ProcessGroup, key: Any) -> tf.Tensor:
    # The last of the keys: gathering rows needs one per bucket.
    last = key + KEYS_PER_TENSOR - 1
    rows = _compared(rows, known_shape(rows, group)[1:], "an allgather", group, last)
    return gather_rows([rows], group, key)[0]


def _compared(
    rows: tf.Tensor, shape: tf.TensorShape, to: str, group: ProcessGroup, key: Any
) -> tf.Tensor:
    """Returns rows, having compared ``shape``, of their last axes, if it is unknown."""
    if shape.is_fully_defined():
        return rows
    axis = rows.shape.rank - shape.rank
    size = compare_shapes(rows, group, key, to=to, axis=axis)
    with tf.control_dependencies([size]):
        return tf.identity(rows)


def _blocks(rows: tf.Tensor, counts: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    """Returns [size, length, ...]: each rank's rows, padded with zeros."""
    place = tf.cumsum(counts, exclusive=True)[:, None] + tf.range(length)[None]
    filled = tf.pad(rows, [[0, 1], *([[0, 0]] * (rows.shape.rank - 1))])
    inside = tf.sequence_mask(counts, length)
    return tf.gather(filled, tf.where(inside, place, tf.shape(rows)[0]))


def _carried(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in a dtype that collectives can move."""
    if tensor.dtype.name in _AS_VALUES:
        return tf.cast(tensor, tf.float16)
    bits = _AS_BITS.get(tensor.dtype.name)
    return tensor if bits is None else tf.bitcast(tensor, bits)


def _restored(carried: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undoes ``_carried``."""
    if dtype.name in _AS_VALUES:
        return tf.cast(carried, dtype)
    return carried if carried.dtype == dtype else tf.bitcast(carried, dtype)


def _describe_scales(scales: tuple[float, float]) -> tuple[tuple[str, str], ...]:
    before, after = (str(s if tf.is_tensor(s) else float(s)) for s in scales)
    return ("prescale_factor", before), ("postscale_factor", after)


def _check_rows(tensors: Sequence[tf.Tensor]) -> None:
    check_dtypes(tensors, _MOVED)
    others = [f"{n} is {t.shape}" for n, t in enumerate(tensors) if not t.shape.rank]
    if others:
        raise ValueError(
            "tensors must have rows, a shape of known rank above zero; of those given, "
            f"{', '.join(others)}."
        )

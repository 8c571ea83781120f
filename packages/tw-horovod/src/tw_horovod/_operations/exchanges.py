"""Exchanges of tensors of any dtype, without gradients, for Horovod's ops.

TensorFlow's collectives support few dtypes. Tensors to add are sent in the next wider
dtype that is supported; tensors that are only moved, in one with the same bits.

    added    uint8 int8 uint16 int16 -> int32, float16 bfloat16: a part on each rank,
             in float32
    moved    uint8 int8 bool -> float16, which holds their values; uint16 int16 -> the
             bits of float16
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import pack_tensors, plan_packing, unpack_tensors
from tw_horovod._operations.reductions import Average, Max, Min, Product, ReduceOp, Sum
from tw_ranks.internal import (
    BUCKETS,
    KEYS_PER_TENSOR,
    NARROW,
    Endpoint,
    Exchange,
    add_narrow,
    add_up,
    check_dtypes,
    combine_flat,
    compare_shapes,
    describe_tensor,
    find_bucket,
    gather_rows,
    known_shape,
    row_spec,
    run_collectives,
    swap,
)

_MERGES = {Average: "Add", Sum: "Add", Min: "Min", Max: "Max", Product: "Mul"}
_WIDE = dict.fromkeys(("uint8", "int8", "uint16", "int16"), tf.int32) | dict.fromkeys(
    NARROW, tf.float32
)
_REDUCED = ("int32", "int64", "float32", "float64", *_WIDE)
_AS_VALUES = ("uint8", "int8", "bool")
_AS_BITS = {"uint16": tf.float16, "int16": tf.float16}
_MOVED = ("int32", "int64", "float32", "float64", *NARROW, *_AS_VALUES, *_AS_BITS)


def reduce(
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    *,
    endpoint: Endpoint,
    scales: tuple[float, float] = (1.0, 1.0),
    name: str = "",
) -> list[tf.Tensor]:
    """Reduces tensors of the same shapes and dtypes over all ranks, element-wise.

    ``scales`` multiply before and after. Means of integers are rounded towards zero.
    Ranks match the exchange by ``name``; by program order if it is "".
    """
    check_dtypes(tensors, _REDUCED)
    wide = [scaled(_widened(t), scales[0]) for t in tensors]
    if endpoint.size > 1:
        options = (("op", op.name), *_describe_scales(scales))
        described = tuple(map(describe_tensor, tensors))
        exchange = Exchange("an allreduce", described, options, name)
        wide = _reduce_packs(tensors, wide, op, endpoint, exchange)
    return [
        _finished(reduced, op, scales[1], endpoint, tensor.dtype)
        for reduced, tensor in zip(wide, tensors, strict=True)
    ]


def gather_all(
    tensors: Sequence[tf.Tensor], *, endpoint: Endpoint, name: str = ""
) -> list[tf.Tensor]:
    """Joins [R, ...] of every rank in rank order; R may differ by tensor and rank."""
    _check_rows(tensors)
    if endpoint.size == 1 or not tensors:
        return list(tensors)
    carried = [_carried(tensor) for tensor in tensors]

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        pairs = zip(brought, keys, strict=True)
        return [_gather(rows, endpoint, key) for rows, key in pairs]

    gathered = run_collectives(
        body,
        carried,
        specs=[row_spec(t) for t in carried],
        endpoint=endpoint,
        exchange=Exchange(
            "an allgather",
            tuple(describe_tensor(t, has_rows=True) for t in tensors),
            name=name,
        ),
    )
    return [_restored(g, t.dtype) for g, t in zip(gathered, tensors, strict=True)]


def deal(
    rows: tf.Tensor, counts: tf.Tensor, *, endpoint: Endpoint, name: str = ""
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends each rank its rows, those for rank 0 first; ``counts`` is int32 [size].

    Returns the rows sent to this rank, those of rank 0 first, and their counts.
    """
    _check_rows([rows])
    if endpoint.size == 1:
        return rows, counts
    carried = _carried(rows)

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        (rows, counts), key = brought, keys[0]
        inner = known_shape(rows, endpoint)[1:]
        rows = _compared(rows, inner, "an alltoall", endpoint, keys[1])
        received = swap(tf.reshape(counts, [endpoint.size, 1]), endpoint, key)[:, 0]
        longest = add_up(tf.reduce_max(counts, keepdims=True), endpoint, key + 1, "Max")
        bucket = find_bucket(longest[0])
        length = tf.gather(BUCKETS, bucket)
        blocks = swap(_blocks(rows, counts, length), endpoint, key + 2 + bucket)
        kept = tf.sequence_mask(received, length)
        return [tf.boolean_mask(blocks, kept), received]

    got, received = run_collectives(
        body,
        [carried, counts],
        specs=[row_spec(carried), tf.TensorSpec([endpoint.size], tf.int32)],
        endpoint=endpoint,
        exchange=Exchange(
            "an alltoall", (describe_tensor(rows, has_rows=True),), name=name
        ),
    )
    return _restored(got, rows.dtype), received


def reduce_shares(
    tensor: tf.Tensor,
    op: ReduceOp,
    *,
    endpoint: Endpoint,
    scales: tuple[float, float],
    name: str = "",
) -> tf.Tensor:
    """Reduces [R, ...] to row shares; the first ``R % size`` ranks get one more row."""
    check_dtypes([tensor], _REDUCED)
    _check_rows([tensor])
    wide = scaled(_widened(tensor), scales[0])
    if endpoint.size == 1:
        return _finished(wide, op, scales[1], endpoint, tensor.dtype)
    is_narrow = tensor.dtype.name in NARROW
    sent = tf.cast(wide, tensor.dtype) if is_narrow else wide

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        [rows], [key] = brought, keys
        rows = _compared(rows, tensor.shape, "a reducescatter", endpoint, key)
        counts = count_shares(tf.shape(rows)[0], endpoint.size)
        bucket = find_bucket(counts[0])
        blocks = _blocks(rows, counts, tf.gather(BUCKETS, bucket))
        blocks = _widened(swap(blocks, endpoint, key + 1 + bucket))
        total = tf.reduce_sum(blocks, axis=0)[: counts[endpoint.rank]]
        if op is Average and total.dtype.is_floating:
            total /= endpoint.size
        return [tf.cast(total, rows.dtype)]

    [share] = run_collectives(
        body,
        [sent],
        specs=[row_spec(sent)],
        endpoint=endpoint,
        exchange=Exchange(
            "a reducescatter",
            (describe_tensor(tensor),),
            (("op", op.name), *_describe_scales(scales)),
            name,
        ),
    )
    share = _finished(_widened(share), op, scales[1], endpoint, tensor.dtype)
    rows = tensor.shape.as_list()[0]
    if rows is None:
        return share
    own = rows // endpoint.size + (endpoint.rank < rows % endpoint.size)
    return tf.ensure_shape(share, [own, *tensor.shape[1:]])


def count_shares(rows: tf.Tensor, size: int) -> tf.Tensor:
    """Returns how many of ``rows`` each rank gets, int32 [size]; the first get more."""
    return rows // size + tf.cast(tf.range(size) < rows % size, tf.int32)


def scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Multiplies a tensor; integers are rounded towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.dtype.name in NARROW:
        return tf.cast(scaled(_widened(tensor), factor), tensor.dtype)
    if tensor.dtype.is_floating:
        return tensor * tf.constant(factor, tensor.dtype)
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def _widened(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, _WIDE.get(tensor.dtype.name, tensor.dtype))


def _finished(
    wide: tf.Tensor, op: ReduceOp, factor: float, endpoint: Endpoint, dtype: tf.DType
) -> tf.Tensor:
    """Scales a reduced tensor; integer means have not been divided yet."""
    if op is Average and not wide.dtype.is_floating:
        factor /= endpoint.size
    return tf.cast(scaled(wide, factor), dtype)


def _reduce_packs(
    tensors: Sequence[tf.Tensor],
    wide: Sequence[tf.Tensor],
    op: ReduceOp,
    endpoint: Endpoint,
    exchange: Exchange,
) -> list[tf.Tensor]:
    """Reduces tensors in one pack per dtype; means of floats are divided."""
    narrow = [
        t.dtype if t.dtype.name in NARROW and _MERGES[op] == "Add" else None
        for t in tensors
    ]
    plan = plan_packing(
        [
            (t.dtype, n) if t.shape.is_fully_defined() else None
            for t, n in zip(wide, narrow, strict=True)
        ]
    )
    packed = pack_tensors(wide, plan)
    firsts = [*(own[0] for own in plan.packs), *plan.alone]

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        return [
            _combine(t, op, narrow[n], endpoint, key)
            for t, n, key in zip(brought, firsts, keys, strict=True)
        ]

    got = run_collectives(
        body,
        packed,
        endpoint=endpoint,
        exchange=exchange,
    )
    return unpack_tensors(got, plan, [t.shape for t in wide])


def _combine(
    tensor: tf.Tensor, op: ReduceOp, narrow: Any, endpoint: Endpoint, key: Any
) -> tf.Tensor:
    divides = op is Average and tensor.dtype.is_floating

    def combine(flat: tf.Tensor, key: Any) -> tf.Tensor:
        if narrow is None:
            return add_up(flat, endpoint, key, _MERGES[op], divides=divides)
        return add_narrow(flat, narrow, endpoint, key, divides=divides)

    return combine_flat(tensor, combine, endpoint, key, to="an allreduce")


def _gather(rows: tf.Tensor, endpoint: Endpoint, key: Any) -> tf.Tensor:
    # The last of the keys: gathering rows needs one per bucket.
    last = key + KEYS_PER_TENSOR - 1
    rows = _compared(
        rows, known_shape(rows, endpoint)[1:], "an allgather", endpoint, last
    )
    return gather_rows([rows], endpoint, key)[0]


def _compared(
    rows: tf.Tensor, shape: tf.TensorShape, to: str, endpoint: Endpoint, key: Any
) -> tf.Tensor:
    """Returns rows, having compared ``shape``, of their last axes, if it is unknown."""
    if shape.is_fully_defined():
        return rows
    axis = rows.shape.rank - shape.rank
    size = compare_shapes(rows, endpoint, key, to=to, axis=axis)
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

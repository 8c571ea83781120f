"""Collectives of all ranks: TensorFlow's ops, and operations built from them.

All but ``row_spec`` and ``check_dtypes`` are for the bodies that ``run_collectives``
runs, which gives them their keys.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.internal import weigh
from tw_ranks import _tf_compat
from tw_ranks._endpoint.endpoint import Endpoint
from tw_ranks._endpoint.hosts import Hosts

GROUP_KEY = 6_144
"""Other users of collectives in a process (``tf.distribute``) count from 1.

The group of the machines' first ranks follows, then two of each machine's ranks.
"""

NARROW = ("float16", "bfloat16")
"""Floats that are added in float32."""

BUCKETS = tuple(
    sorted({(8 + m << e) // 8 for e in range(31) for m in range(8)} - {2**31})
)
"""Padded lengths of tensors whose length changes from step to step.

TensorFlow requires one shape per key. There are eight lengths per power of two, so that
at most an eighth is padding.
"""

KEYS_PER_LENGTH = len(BUCKETS)

KEYS_PER_TENSOR = 1 + 2 * KEYS_PER_LENGTH
"""For a tensor whose length changes: one to compare lengths, then two per bucket."""


_WIDE_BYTES = 1 << 16  # of a row


_by_nccl: ContextVar[bool] = ContextVar("by_nccl", default=False)


@contextlib.contextmanager
def by_nccl(uses: bool) -> Iterator[None]:
    """Scope of collectives that NCCL carries, if it ``uses`` NCCL.

    They must start in one order on all ranks. So all take one resource, their ordering
    token, by which TensorFlow chains them in a function, and in its branches.
    """
    token = _by_nccl.set(uses)
    try:
        yield
    finally:
        _by_nccl.reset(token)


def check_dtypes(tensors: Sequence[tf.Tensor], known: Sequence[str]) -> None:
    """Refuses tensors of other dtypes."""
    others = [
        f"{n} is {t.dtype.name}"
        for n, t in enumerate(tensors)
        if t.dtype.name not in known
    ]
    if others:
        raise ValueError(
            f"tensors must be {', '.join(known)}; of those given, {', '.join(others)}."
        )


def row_spec(tensor: tf.Tensor) -> tf.TensorSpec:
    """Describes [R, ...] for ``run_collectives``, where R may differ between ranks."""
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def add_up(
    tensor: tf.Tensor, endpoint: Endpoint, key: Any, op: str, *, divides: bool = False
) -> tf.Tensor:
    """Combines all ranks' tensors by "Add", "Mul", "Min" or "Max".

    Takes 32- and 64-bit floats and integers; all ranks get the same bits.
    """
    if (mpi := endpoint.mpi) is not None:
        summed = mpi.add_up(_tf_compat.as_array(tensor), op, divides=divides)
        return as_tensor(summed)
    if tensor.dtype == tf.int32 and tf.config.get_visible_devices("GPU"):
        # TensorFlow's all-reduce does not take int32 on GPUs.
        wide = add_up(tf.cast(tensor, tf.int64), endpoint, key, op, divides=divides)
        return tf.cast(wide, tf.int32)
    if endpoint.hosts is not None:
        return _add_up_by_hosts(tensor, endpoint, endpoint.hosts, key, op, divides)
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        merge_op=op,
        final_op="Div" if divides else "Id",
        **_in_order(endpoint, key),
    )


def _add_up_by_hosts(
    tensor: tf.Tensor,
    endpoint: Endpoint,
    hosts: Hosts,
    key: Any,
    op: str,
    divides: bool,
) -> tf.Tensor:
    """Adds on each machine, over the machines' first ranks, and sends them the sum."""

    def among(size: int, number: int) -> dict[str, Any]:
        return {
            **_among(endpoint, key),
            "group_size": size,
            "group_key": GROUP_KEY + 1 + number,
        }

    how = {"merge_op": op, "final_op": "Id", "ordering_token": []}
    add = partial(tf.raw_ops.CollectiveReduceV2, **how)
    has_others, first = hosts.local_size > 1, 1 + 2 * hosts.host
    if has_others:
        tensor = add(input=tensor, **among(hosts.local_size, first))
    if hosts.is_first:
        tensor = add(input=tensor, **among(hosts.num_hosts, 0))
        if divides:
            size = tf.cast(endpoint.size, tensor.dtype)
            tensor = tf.raw_ops.Div(x=tensor, y=size)  # As the ring does, integers too.
    if not has_others:
        return tensor
    back = among(hosts.local_size, first + 1)
    if hosts.is_first:
        return tf.raw_ops.CollectiveBcastSendV2(input=tensor, **back)
    # The next time, in a loop, only when this one is over.
    with tf.control_dependencies([tensor]):
        shape, dtype = tf.shape(tensor), tensor.dtype
        return tf.ensure_shape(
            tf.raw_ops.CollectiveBcastRecvV2(shape=shape, T=dtype, **back),
            tensor.shape,
        )


def gather(
    tensor: tf.Tensor, endpoint: Endpoint, key: Any, *, has_elements: bool = False
) -> tf.Tensor:
    """Concatenates all ranks' tensors, [R, ...], to [size R, ...] in rank order.

    With ``has_elements`` it is a matrix that is known not to be empty.
    """
    if endpoint.mpi is not None:
        return as_tensor(endpoint.mpi.gather(_tf_compat.as_array(tensor)))
    if tensor.dtype == tf.bfloat16:  # The op rejects it, but only moves bits.
        bits = tf.bitcast(tensor, tf.float16)
        gathered = gather(bits, endpoint, key, has_elements=has_elements)
        return tf.bitcast(gathered, tf.bfloat16)
    op = tf.raw_ops.CollectiveGatherV2
    if has_elements:
        return op(input=tensor, **_in_order(endpoint, key))
    return _run_with_elements(op, tensor, endpoint, key)


def swap(
    tensor: tf.Tensor, endpoint: Endpoint, key: Any, *, has_elements: bool = False
) -> tf.Tensor:
    """Sends row r of [size, ...] to rank r; returns [size, ...], each rank's row.

    With ``has_elements`` it is a matrix that is known not to be empty.
    """
    if endpoint.mpi is not None:
        return as_tensor(endpoint.mpi.swap(_tf_compat.as_array(tensor)))
    op = tf.raw_ops.CollectiveAllToAllV2
    if has_elements:
        return op(input=tensor, **_in_order(endpoint, key))
    return _run_with_elements(op, tensor, endpoint, key)


def add_narrow(
    flat: tf.Tensor,
    wire: tf.DType,
    endpoint: Endpoint,
    key: Any,
    *,
    divides: bool = False,
    weights: Sequence[tf.Tensor] | None = None,
) -> tf.Tensor:
    """Adds [R], R >= 1, sent in a narrow dtype: each rank adds a part in float32.

    Gradients times their ``weights``, by rank, may overflow the narrow dtype, so they
    are weighted in float32, too. Takes the first of two keys.
    """
    size, sent = endpoint.size, tf.cast(flat, wire)
    count = flat.shape.num_elements() or tf.size(flat)
    filled = tf.reshape(tf.pad(sent, [[0, -count % size]]), [size, -1])
    parts = swap(filled, endpoint, key, has_elements=True)
    wide = tf.unstack(tf.cast(parts, tf.float32), num=size)
    if weights is not None:
        wide = [weigh(part, w) for part, w in zip(wide, weights, strict=True)]
    added = tf.add_n(wide)  # Not reduce_sum, which starts from 0.0: -0.0 would be lost.
    if divides:
        added /= size
    own = tf.cast(added, wire)[tf.newaxis]
    sums = gather(own, endpoint, key + 1, has_elements=True)
    summed = tf.slice(tf.reshape(sums, [-1]), [0], [count])
    return tf.cast(summed, flat.dtype)


def add_to_owners(
    flat: tf.Tensor, lengths: Sequence[int], endpoint: Endpoint, key: Any
) -> tf.Tensor:
    """Adds [sum of lengths] over the ranks; returns this rank's part.

    TensorFlow has no such op for CPUs. Ranks swap parts, padded to the longest, and
    each adds its own.
    """
    if endpoint.mpi is not None:
        array = _tf_compat.as_array(flat)
        return as_tensor(endpoint.mpi.reduce_scatter(array, lengths))
    longest, size = max(lengths), endpoint.size
    if set(lengths) == {longest}:
        rows = tf.reshape(flat, [size, longest])
    else:
        rows = tf.stack([_pad_to(p, longest) for p in tf.split(flat, list(lengths))])
    swapped = swap(rows, endpoint, key, has_elements=True)
    return tf.add_n(tf.unstack(swapped))[: lengths[endpoint.rank]]


def join_of_owners(
    own: tf.Tensor, lengths: Sequence[int], endpoint: Endpoint, key: Any
) -> tf.Tensor:
    """Joins the flat tensors of all ranks, to [sum of lengths]."""
    if endpoint.mpi is not None:
        return as_tensor(endpoint.mpi.all_gather(_tf_compat.as_array(own), lengths))
    longest, own = max(lengths), tf.ensure_shape(own, [lengths[endpoint.rank]])
    row = _pad_to(own, longest)[tf.newaxis]
    rows = gather(row, endpoint, key, has_elements=True)
    if set(lengths) == {longest}:
        return tf.reshape(rows, [-1])
    parts = zip(tf.unstack(rows, num=endpoint.size), lengths, strict=True)
    return tf.concat([part[:n] for part, n in parts], axis=0)


def _pad_to(flat: tf.Tensor, length: int) -> tf.Tensor:
    missing = length - flat.shape[0]
    return tf.pad(flat, [[0, missing]]) if missing else flat


def _run_with_elements(
    op: Callable[..., tf.Tensor], tensor: tf.Tensor, endpoint: Endpoint, key: Any
) -> tf.Tensor:
    """Moves rows by ``op``; empty rows are sent with one element.

    TensorFlow crashes on empty tensors, and ranks must wait for each other on these as
    well.
    """
    known = tensor.shape[1:]
    width: Any = known.num_elements() or tf.reduce_prod(tf.shape(tensor)[1:])
    may_be_empty = tf.is_tensor(width)
    # One shape per key: a matrix, even where more of the shape is known elsewhere.
    flat = tf.reshape(tensor, [tf.shape(tensor)[0], width])
    if may_be_empty:
        flat = tf.pad(flat, [[0, 0], [0, tf.cast(tf.equal(width, 0), tf.int32)]])
    got = op(input=flat, **_in_order(endpoint, key))
    if not may_be_empty:
        return tf.reshape(got, [-1, *known])
    shape = tf.concat([tf.shape(got)[:1], tf.shape(tensor)[1:]], axis=0)
    return tf.ensure_shape(tf.reshape(got[:, :width], shape), [None, *known])


def find_bucket(length: tf.Tensor) -> tf.Tensor:
    """Returns the index of the smallest bucket that holds ``length``, int32 []."""
    return tf.searchsorted(BUCKETS, [length], side="left")[0]


def pad(tensor: tf.Tensor, bucket: tf.Tensor) -> tf.Tensor:
    """Pads axis 0 of [R, ...] with zeros to a bucket's length."""
    missing = tf.gather(BUCKETS, bucket) - tf.shape(tensor)[0]
    return tf.pad(tensor, [[0, missing], *([[0, 0]] * (tensor.shape.rank - 1))])


def compare_shapes(
    tensor: tf.Tensor,
    endpoint: Endpoint,
    key: Any,
    *,
    to: str,
    axis: int = 0,
    skips_empty: bool = False,
) -> tf.Tensor:
    """Fails on all ranks unless their tensors' shapes agree from ``axis`` on.

    For shapes unknown before the graph runs; an axis above 0 needs a known rank. With
    ``skips_empty``, empty tensors may have any shape. Returns the largest number of
    elements, int32 [].
    """
    shape = tf.shape(tensor)
    own = tf.concat([[tf.size(tensor)], tf.shape(shape), shape, [0] * 8], axis=0)
    told = gather(own[None, :10], endpoint, key)
    sizes, shapes = told[:, 0], told[:, 1:]
    compared = shapes[:, 1 + axis :] if axis else shapes
    differs = tf.reduce_any(compared != compared[tf.argmax(sizes)], axis=1)
    if skips_empty:
        differs &= sizes > 0
    says = f"all ranks must pass the same shape to {to!r}; by rank, they pass"
    with tf.device("/cpu:0"):
        known = shapes[:, 1 : 1 + tf.reduce_max(shapes[:, 0])]
        alike = tf.logical_not(tf.reduce_any(differs))
        if endpoint.mpi is not None and not alike:
            rows = "".join(str(row).replace(",", "") for row in known.numpy().tolist())
            raise tf.errors.InvalidArgumentError(None, None, f"{says} [{rows}]")
        check = tf.debugging.Assert(alike, [says, known], summarize=1 << 10)
    with tf.control_dependencies([check]):
        return tf.reduce_max(sizes)


def combine_flat(
    tensor: tf.Tensor,
    combine: Callable[[tf.Tensor, Any], tf.Tensor],
    endpoint: Endpoint,
    key: Any,
    *,
    to: str,
    skips_empty: bool = False,
) -> tf.Tensor:
    """Combines tensors of any shape by a function of [R] and the first of two keys.

    A shape not known before the graph runs is compared, and padded to the bucket of the
    longest, which has its own keys.
    """
    flat, shape = tf.reshape(tensor, [-1]), known_shape(tensor, endpoint)
    is_padded = not shape.is_fully_defined()
    if is_padded:
        longest = compare_shapes(tensor, endpoint, key, to=to, skips_empty=skips_empty)
        bucket = find_bucket(longest)
        flat, key = pad(flat, bucket), key + 1 + 2 * bucket
    elif not shape.num_elements():  # TensorFlow's ring rejects empty tensors.
        is_padded, flat = True, pad(flat, 0)
    combined = combine(flat, key)
    if is_padded:
        combined = tf.slice(combined, [0], [tf.size(tensor)])
    return tf.ensure_shape(tf.reshape(combined, tf.shape(tensor)), tensor.shape)


def gather_rows(
    tensors: Sequence[tf.Tensor], endpoint: Endpoint, key: Any
) -> list[tf.Tensor]:
    """Concatenates [R, ...] of all ranks in rank order; R may differ by rank.

    Returns [sum of R, ...] per tensor, then R of each rank, int32 [size]. Needs
    1 + KEYS_PER_LENGTH * len(tensors) keys, of which ``key`` is the first.
    """
    own = tf.shape(tensors[0])[:1]
    counts = gather(own, endpoint, key)
    bucket = find_bucket(tf.reduce_max(counts))
    kept = tf.reshape(tf.sequence_mask(counts, tf.gather(BUCKETS, bucket)), [-1])
    first = key + 1 + bucket
    joined = []
    for n, tensor in enumerate(tensors):
        own_key = first + n * KEYS_PER_LENGTH
        if _is_wide(tensor):
            joined.append(_gather_wide(tensor, bucket, kept, endpoint, own_key))
        else:
            gathered = gather(pad(tensor, bucket), endpoint, own_key)
            joined.append(tf.boolean_mask(gathered, kept))
    return [*joined, counts]


def _is_wide(tensor: tf.Tensor) -> bool:
    width = tensor.shape[1:].num_elements() or 0
    return bool(width * tensor.dtype.size >= _WIDE_BYTES)


def _gather_wide(
    tensor: tf.Tensor, bucket: tf.Tensor, kept: tf.Tensor, endpoint: Endpoint, key: Any
) -> tf.Tensor:
    """Gathers wide rows, which are neither padded nor copied if none is missing."""
    rows = tf.cond(
        tf.equal(tf.shape(tensor)[0], tf.gather(BUCKETS, bucket)),
        lambda: tensor,
        lambda: pad(tensor, bucket),
    )
    gathered = gather(tf.ensure_shape(rows, [None, *tensor.shape[1:]]), endpoint, key)
    return tf.cond(
        tf.reduce_all(kept), lambda: gathered, lambda: tf.boolean_mask(gathered, kept)
    )


def send(tensor: tf.Tensor, endpoint: Endpoint, key: Any) -> tf.Tensor:
    """Sends a tensor to all other ranks, which ``receive`` it; returns it.

    NCCL does not carry it, as the op takes no ordering token.
    """
    if endpoint.mpi is not None:
        return as_tensor(endpoint.mpi.send(_tf_compat.as_array(tensor)))
    return tf.raw_ops.CollectiveBcastSendV2(input=tensor, **_among(endpoint, key))


def receive(
    spec: tf.TensorSpec, endpoint: Endpoint, key: Any, *, root: int
) -> tf.Tensor:
    """Returns the tensor that rank ``root`` sends."""
    shape, dtype = spec.shape, spec.dtype
    if (mpi := endpoint.mpi) is not None:
        return as_tensor(mpi.receive(shape.as_list(), dtype.as_numpy_dtype, root))
    return tf.raw_ops.CollectiveBcastRecvV2(
        shape=shape, T=dtype, **_among(endpoint, key)
    )


def _in_order(endpoint: Endpoint, key: Any) -> dict[str, Any]:
    """Returns the arguments of ops that NCCL can carry."""
    known = _among(endpoint, key)
    if not _by_nccl.get():
        return {**known, "ordering_token": []}
    handle = endpoint.carrier.ordering_token.handle
    return {**known, "ordering_token": [handle], "communication_hint": "nccl"}


def as_tensor(array: np.ndarray) -> tf.Tensor:
    """Returns an eager tensor in an array's memory; ``tf.constant`` would copy it."""
    return tf.raw_ops.Identity(input=array)


def known_shape(tensor: tf.Tensor, endpoint: Endpoint) -> tf.TensorShape:
    """Returns a tensor's shape as far as ranks know each other's."""
    return tensor.shape if endpoint.mpi is None else endpoint.mpi.known_shape(tensor)


def _among(endpoint: Endpoint, key: Any) -> dict[str, Any]:
    """Returns the arguments of any collective op; "auto" is the ring."""
    return {
        "group_size": endpoint.size,
        "group_key": GROUP_KEY,
        "instance_key": key,
        "communication_hint": "auto",
    }

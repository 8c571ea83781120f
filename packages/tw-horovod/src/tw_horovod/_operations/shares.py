"""Horovod's collectives that give each rank its own rows; see ``ops.py``."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import without_autograph
from tw_horovod._operations import exchanges
from tw_horovod._operations.ops import (
    Tensors,
    differentiable,
    full_name,
    gather_rows,
    named,
    of_gradient,
)
from tw_horovod._operations.reductions import Average, Sum, check_op
from tw_horovod._state.group import find_endpoint, find_group, global_process_set
from tw_horovod.compression import Compression
from tw_ranks.internal import Endpoint


@without_autograph
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Sends each rank its rows of a tensor.

    Args:
      tensor: [R, ...], the rows for rank 0 first; R may differ between ranks; any dtype
        but string.
      splits: integers [size], the number of rows for each rank, R in total; None for
        R / size rows each.
      name: as in ``allreduce``.
      ignore_name_scope: as in ``allreduce``.
      process_set: all ranks.

    Returns:
      The rows sent to this rank, those of rank 0 first; with ``splits``, also int32
      [size], the number of rows from each rank.

    Raises:
      ValueError: as in ``allgather``.
      tf.errors.InvalidArgumentError: R is not the sum of the splits, or not a multiple
        of the number of ranks.
    """
    endpoint = find_endpoint(process_set)
    rows = tf.convert_to_tensor(tensor)
    counts = _count_rows(rows, splits, endpoint)
    label, received = full_name(name, ignore_name_scope), Tensors()

    def forward(given: Tensors) -> Tensors:
        got, own = exchanges.deal(given[0], counts, endpoint=endpoint, name=label)
        received.append(own)
        return [got, own]

    def backward(grads: Tensors) -> Tensors:
        own = received[-1]
        above = of_gradient(label)
        return [exchanges.deal(grads[0], own, endpoint=endpoint, name=above)[0]]

    got, own = differentiable(forward, backward, [rows])
    return named(got, name) if splits is None else (named(got, name), own)


@without_autograph
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over all ranks, and gives each rank a share of the rows.

    Args:
      tensor: [R, ...], of the same shape and dtype on all ranks; integers or floats.
      device_dense: changes nothing.
      compression: of the tensors that are sent.
      op: Average or Sum.
      name: as in ``allreduce``.
      process_set: all ranks.
      ignore_name_scope: as in ``allreduce``.
      prescale_factor: multiplies the tensor first.
      postscale_factor: multiplies the result.

    Returns:
      This rank's rows; the first ``R % size`` ranks have one more than the rest.

    Raises:
      NotImplementedError: another ``op``.
      ValueError: as in ``allreduce``; shape [].
    """
    find_group(process_set)
    scales = (prescale_factor, postscale_factor)
    label = full_name(name, ignore_name_scope)
    [result] = _reducescatter([tensor], compression, op, scales, label)
    return named(result, name)


@without_autograph
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensors:
    """Applies ``reducescatter`` to each of [N] tensors; returns [N] shares."""
    find_group(process_set)
    scales = (prescale_factor, postscale_factor)
    return _reducescatter(tensors, compression, op, scales)


def _count_rows(rows: tf.Tensor, splits: Any, endpoint: Endpoint) -> tf.Tensor:
    """Returns the number of rows for each rank, int32 [size]."""
    own = tf.shape(rows)[0]
    if splits is None:
        counts = tf.fill([endpoint.size], own // endpoint.size)
    else:
        counts = tf.ensure_shape(tf.cast(splits, tf.int32), [endpoint.size])
    says = (
        f"alltoall: the splits must be {endpoint.size} numbers that add up to the "
        "number of rows, or None if that is a multiple of the number of ranks."
    )
    check = tf.debugging.assert_equal(tf.reduce_sum(counts), own, says)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(counts)


def _reducescatter(
    tensors: Sequence[Any],
    compression: Any,
    op: Any,
    scales: tuple[float, float],
    name: str = "",
) -> Tensors:
    endpoint = find_endpoint()
    known = check_op(op, (Average, Sum))
    factor = scales[0] * scales[1] * (endpoint.size if known is Sum else 1)

    def forward(given: Tensors) -> Tensors:
        return [
            exchanges.reduce_shares(
                given[0], known, endpoint=endpoint, scales=scales, name=name
            )
        ]

    def backward(grads: Tensors) -> Tensors:
        scaled = exchanges.scaled(grads[0], factor)
        return gather_rows([scaled], of_gradient(name))

    results = []
    for tensor in tensors:
        sent, context = compression.compress(tf.convert_to_tensor(tensor))
        [share] = differentiable(forward, backward, [sent])
        results.append(compression.decompress(share, context))
    return results

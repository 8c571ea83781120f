"""Horovod's tensor collectives, with the gradients that Horovod gives them.

``device_dense`` and ``device_sparse`` change nothing here: collectives run where
TensorFlow puts them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core.internal import with_gradient, without_autograph
from tw_horovod._operations import exchanges
from tw_horovod._operations.reductions import Average, ReduceOp, Sum, choose_op
from tw_horovod._state.group import find_endpoint, find_group, global_process_set
from tw_horovod.compression import Compression
from tw_ranks.internal import Endpoint, broadcast_tensors

Tensors = list[tf.Tensor]


@without_autograph
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor over all ranks.

    Args:
      tensor: of the same shape and dtype on all ranks; integers or floats. For
        ``tf.IndexedSlices``, the rows of all ranks are joined, and rows of the same
        index are not added up.
      average: True for ``op=Average``, False for ``op=Sum``; deprecated.
      device_dense: changes nothing.
      device_sparse: changes nothing.
      compression: of the dense tensors that are sent.
      op: None for Average; or Sum, Min, Max, Product. Means of integers are rounded
        towards zero.
      prescale_factor: multiplies the tensor first.
      postscale_factor: multiplies the result.
      name: by which ranks match the op, with its name scope; names the result, in a
        graph. Ops without one are matched in program order, as are eager ops.
      process_set: all ranks.
      ignore_name_scope: whether ``name`` is matched without its name scope.

    Returns:
      The result, of the same shape and dtype, the same on all ranks.

    Raises:
      NotImplementedError: Adasum; Min, Max, Product or factors with
        ``tf.IndexedSlices``.
      ValueError: ``op`` and ``average`` are both given; a dtype that cannot be added; a
        tensor that differs from another rank's.
    """
    find_group(process_set)
    [result] = _allreduce(
        [tensor],
        compression,
        choose_op(op, average),
        (prescale_factor, postscale_factor),
        full_name(name, ignore_name_scope),
    )
    return named(result, name)


@without_autograph
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduces [N] tensors, dense or sparse, over all ranks in one exchange.

    Their dtypes may differ. All else is as in ``allreduce``, but ``name`` does not name
    the [N] results.
    """
    find_group(process_set)
    scales = (prescale_factor, postscale_factor)
    chosen = choose_op(op, average)
    label = full_name(name, ignore_name_scope)
    return _allreduce(tensors, compression, chosen, scales, label)


@without_autograph
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> tf.Tensor:
    """Joins the rows of all ranks, in rank order.

    Args:
      tensor: [R, ...], where R may differ between ranks; any dtype but string.
      name: as in ``allreduce``.
      ignore_name_scope: as in ``allreduce``.
      process_set: all ranks.

    Returns:
      [sum of R, ...], the same on all ranks.

    Raises:
      ValueError: shape []; a shape or dtype that differs from another rank's.
    """
    find_group(process_set)
    label = full_name(name, ignore_name_scope)
    [result] = gather_rows([tensor], label)
    return named(result, name)


@without_autograph
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Tensors:
    """Joins the rows of all ranks for each of [N] tensors, in one exchange.

    All else is as in ``allgather``, but ``name`` does not name the [N] results.
    """
    find_group(process_set)
    label = full_name(name, ignore_name_scope)
    return gather_rows(tensors, label)


@without_autograph
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> tf.Tensor:
    """Returns one rank's tensor on all ranks.

    Args:
      tensor: of the same shape and dtype on all ranks; any dtype but string.
      root_rank: the rank whose tensor is sent.
      name: as in ``allreduce``.
      ignore_name_scope: as in ``allreduce``.
      process_set: all ranks.

    Returns:
      The root's tensor, of the same shape and dtype.

    Raises:
      ValueError: a root that is not a rank; a string; a shape or dtype that differs
        from another rank's.
    """
    endpoint = find_endpoint(process_set)
    label = full_name(name, ignore_name_scope)

    def forward(given: Tensors) -> Tensors:
        return [_broadcast(given[0], root_rank, endpoint, label)]

    def backward(grads: Tensors) -> Tensors:
        above = of_gradient(label)
        reduced = _reduced(grads, Average, (1.0, 1.0), above)
        return reduced if endpoint.rank == root_rank else [reduced[0] * 0]

    [result] = differentiable(forward, backward, [tf.convert_to_tensor(tensor)])
    return named(result, name)


def reduce_rows(
    slices: tf.IndexedSlices, op: ReduceOp, name: str = ""
) -> tf.IndexedSlices:
    """Joins the rows of all ranks, divided by the group's size if ``op`` is Average."""
    size = find_endpoint().size
    values, indices = gather_rows([slices.values, slices.indices], name)
    if op is Average:
        values = values / tf.cast(size, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def gather_rows(tensors: Sequence[Any], name: str = "") -> Tensors:
    """Joins the rows of all ranks for each of several tensors, with gradients."""
    endpoint = find_endpoint()
    known = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not known:
        return []

    def backward(grads: Tensors) -> Tensors:
        above = of_gradient(name)
        means = _reduced(grads, Average, (1.0, 1.0), above)
        rows = tf.stack([tf.shape(tensor)[0] for tensor in known])
        [counts] = exchanges.gather_all([rows[None]], endpoint=endpoint, name=above)
        before = tf.reduce_sum(counts[: endpoint.rank], axis=0)
        return [mean[before[n] :][: rows[n]] for n, mean in enumerate(means)]

    def forward(given: Tensors) -> Tensors:
        return exchanges.gather_all(given, endpoint=endpoint, name=name)

    return differentiable(forward, backward, known)


def differentiable(
    forward: Callable[[Tensors], Tensors],
    backward: Callable[[Tensors], Tensors],
    tensors: Tensors,
) -> Tensors:
    """Returns ``forward(tensors)``, whose gradients ``backward`` computes."""
    # The ops inside have no gradients, and TensorFlow must not look for any.
    inner = [tf.stop_gradient(tensor) for tensor in tensors]
    return with_gradient(forward(inner), tensors, lambda *dy: backward(list(dy)))


def named(result: Any, name: str | None) -> Any:
    """Names a result, in a graph."""
    if name is None or tf.executing_eagerly():
        return result
    return tf.identity(result, name=name)


def full_name(name: str | None, ignore_name_scope: bool = False) -> str:
    """Returns the name by which ranks match an op, "" if it has none.

    As in Horovod, the name scope is part of it, but without the number that a graph
    appends to a repeated scope, which depends on the order.
    """
    if not name or ignore_name_scope or tf.executing_eagerly():
        return name or ""
    graph = tf.compat.v1.get_default_graph()
    scope = graph.get_name_scope()
    own, above = [], ""
    with graph.name_scope(None):
        for part in scope.split("/") if scope else ():
            base, _, number = part.rpartition("_")
            was_added = number.isdecimal() and base and not _is_new(graph, above + base)
            own.append(base if was_added else part)
            above += f"{part}/"
    return "/".join([*own, name])


def _is_new(graph: tf.Graph, path: str) -> bool:
    return bool(graph.unique_name(path, mark_as_used=False) == path)


def of_gradient(name: str) -> str:
    """Returns the name of the exchange of an op's gradient."""
    return f"{name}_gradient" if name else ""


def _allreduce(
    tensors: Sequence[Any],
    compression: Any,
    op: ReduceOp,
    scales: tuple[float, float],
    name: str,
) -> list[Any]:
    sparse = {n: t for n, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)}
    if sparse and (op not in (Average, Sum) or scales != (1.0, 1.0)):
        raise NotImplementedError(
            "allreduce takes tf.IndexedSlices with op Average or Sum and without "
            f"factors; got {op.name} and factors {scales}."
        )
    results: dict[int, Any] = {n: reduce_rows(t, op, name) for n, t in sparse.items()}
    dense = [n for n in range(len(tensors)) if n not in sparse]
    sent = [compression.compress(tf.convert_to_tensor(tensors[n])) for n in dense]
    reduced = _reduced([tensor for tensor, _ in sent], op, scales, name)
    for n, tensor, (_, context) in zip(dense, reduced, sent, strict=True):
        results[n] = compression.decompress(tensor, context)
    return [results[n] for n in range(len(tensors))]


def _reduced(
    tensors: Tensors, op: ReduceOp, scales: tuple[float, float], name: str = ""
) -> Tensors:
    if not tensors:
        return []
    endpoint = find_endpoint()
    return differentiable(
        lambda given: exchanges.reduce(
            given, op, endpoint=endpoint, scales=scales, name=name
        ),
        lambda grads: _reduced(grads, op, scales, of_gradient(name)),
        tensors,
    )


def _broadcast(
    tensor: tf.Tensor, root: int, endpoint: Endpoint, name: str
) -> tf.Tensor:
    if tensor.shape.is_fully_defined():
        return broadcast_tensors([tensor], endpoint=endpoint, root=root, label=name)[0]
    flat = tf.reshape(tensor, [-1])
    own = flat if endpoint.rank == root else flat[:0]
    [received] = exchanges.gather_all([own], endpoint=endpoint, name=name)
    return tf.ensure_shape(tf.reshape(received, tf.shape(tensor)), tensor.shape)

"""Collectives of TensorFlow's eager runtime, run from each mode.

    tf.function      the ops are part of the function; an op before and an op after them
                     count, so that the side channel knows how far this rank is
    eager            the same ops, compiled into a function of their own
    session graph    an op calls such a function through Python: neither a plain local
                     session nor a server's has an eager runtime of its own

Each exchange is described first, and all ranks agree on it (``_agreement.py``). The
keys by which TensorFlow matches the ops of different processes follow from that.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.modes import (
    builds_session_graph,
    compiles_with_xla,
    traces_function,
    without_autograph,
)
from tw_syncrep import _tf_compat
from tw_syncrep.processes._agreement import Exchange
from tw_syncrep.processes._group import ProcessGroup

GROUP_KEY = 6_144
"""Other users of collectives in a process (``tf.distribute``) count from 1."""

Body = Callable[[list[tf.Tensor], list[int]], list[tf.Tensor]]
"""Takes this rank's tensors, and the first key of each; returns the results.

A tensor of known shape has two keys, any other KEYS_PER_TENSOR.
"""


@without_autograph
def run_collectives(
    body: Body,
    tensors: Sequence[tf.Tensor],
    specs: Sequence[tf.TensorSpec],
    *,
    group: ProcessGroup,
    exchange: Exchange,
    find_weight: Callable[[list[tf.Tensor]], tf.Tensor] | None = None,
) -> list[tf.Tensor]:
    """Runs collectives in the caller's mode; ``specs`` describe inputs and results.

    In exchanges that finished ranks join with -0.0, ``find_weight`` returns the weight
    of all ranks, [1], from the results.
    """
    graph = None
    if not tf.executing_eagerly():
        if compiles_with_xla():
            raise ValueError(
                "Collectives between processes cannot be compiled by XLA; trace the "
                "step with jit_compile=False (of a Keras model: compile("
                "jit_compile=False))."
            )
        graph = _outermost_graph()
    counts = [2 if s.shape.is_fully_defined() else KEYS_PER_TENSOR for s in specs]
    *offsets, num_keys = itertools.accumulate(counts, initial=0)
    first_key = group.note_use(exchange, graph, num_keys)
    bound = _Bound(
        body,
        specs,
        [first_key + n for n in offsets],
        group,
        needs_all=find_weight is None,
    )
    if find_weight is not None:
        group.of_step[first_key] = (bound, find_weight)
    if builds_session_graph():
        return _run_in_session(bound, tensors, may_hold=not exchange.name)
    if traces_function():
        return _run_in_function(bound, tensors, is_ordered=not exchange.name)
    return bound.run(tensors)


class _Bound:
    """Collectives with their keys, compiled when they are first called from Python."""

    def __init__(
        self,
        body: Body,
        specs: Sequence[tf.TensorSpec],
        keys: list[int],
        group: ProcessGroup,
        *,
        needs_all: bool,
    ) -> None:
        """Takes arguments of ``run_collectives``, and the first key of each tensor."""
        self.group = group
        self.specs = list(specs)
        self.key = keys[0]
        self._body, self._keys = body, keys
        self.needs_all = needs_all  # Including ranks that have finished.

    def build(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Builds the ops in the current graph."""
        # A group has one device per rank, whichever logical CPU the caller uses.
        has_gpu = bool(tf.config.list_logical_devices("GPU"))
        with contextlib.nullcontext() if has_gpu else tf.device("/cpu:0"):
            return self._body(list(tensors), self._keys)

    def run(self, tensors: Sequence[Any], *, blocks: bool = True) -> list[tf.Tensor]:
        """Runs them now, eagerly; see ``ProcessGroup.host_call``."""

        def trace() -> Any:
            traced = tf.function(
                lambda *brought: self.build(brought),
                input_signature=self.specs,
                autograph=False,
            )
            return traced.get_concrete_function()

        compiled = self.group.compile(self.key, trace)
        with self.group.host_call(self.key, blocks=blocks, needs_all=self.needs_all):
            return list(compiled(*tensors))

    def run_with_nothing(self) -> list[tf.Tensor]:
        """Runs them on tensors of -0.0; dimensions of unknown size are 0."""
        shapes = [[size or 0 for size in spec.shape.as_list()] for spec in self.specs]
        return self.run(
            [
                -tf.zeros(shape, spec.dtype)
                for shape, spec in zip(shapes, self.specs, strict=True)
            ],
            blocks=False,
        )


def add_up(
    tensor: tf.Tensor, group: ProcessGroup, key: Any, op: str, *, divides: bool = False
) -> tf.Tensor:
    """Combines all ranks' tensors by "Add", "Mul", "Min" or "Max".

    Takes 32- and 64-bit floats and integers; all ranks get the same bits.
    """
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        group_size=group.size,
        group_key=GROUP_KEY,
        instance_key=key,
        ordering_token=[],
        merge_op=op,
        final_op="Div" if divides else "Id",
        communication_hint="auto",
    )


def gather(tensor: tf.Tensor, group: ProcessGroup, key: Any) -> tf.Tensor:
    """Concatenates all ranks' tensors, [R, ...], to [size R, ...] in rank order."""
    if tensor.dtype == tf.bfloat16:  # The op does not take it, but only moves bits.
        gathered = gather(tf.bitcast(tensor, tf.float16), group, key)
        return tf.bitcast(gathered, tf.bfloat16)
    return _run_with_elements(tf.raw_ops.CollectiveGatherV2, tensor, group, key)


def swap(tensor: tf.Tensor, group: ProcessGroup, key: Any) -> tf.Tensor:
    """Sends row r of [size, ...] to rank r; returns [size, ...], each rank's row."""
    return _run_with_elements(tf.raw_ops.CollectiveAllToAllV2, tensor, group, key)


def _run_with_elements(
    op: Callable[..., tf.Tensor], tensor: tf.Tensor, group: ProcessGroup, key: Any
) -> tf.Tensor:
    """Moves rows by ``op``; empty rows travel with one element.

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
    got = op(
        input=flat,
        group_size=group.size,
        group_key=GROUP_KEY,
        instance_key=key,
        ordering_token=[],
        communication_hint="auto",
    )
    if not may_be_empty:
        return tf.reshape(got, [-1, *known])
    shape = tf.concat([tf.shape(got)[:1], tf.shape(tensor)[1:]], axis=0)
    return tf.ensure_shape(tf.reshape(got[:, :width], shape), [None, *known])


def _run_in_function(
    bound: _Bound, tensors: Sequence[tf.Tensor], *, is_ordered: bool
) -> list[tf.Tensor]:
    progress, graph = bound.group.progress, tf.compat.v1.get_default_graph()
    with tf.control_dependencies(tensors), tf.device("/cpu:0"):
        began = [1, 0, bound.key, int(bound.needs_all)]
        progress.assign_add(began, read_value=False)
    known = len(graph.get_operations())
    results = bound.build(tensors)
    if not is_ordered:
        # A function runs collectives in program order, which differs between ranks
        # where names match them.
        made = graph.get_operations()[known:]
        _tf_compat.run_independently(
            graph, [op for op in made if op.type.startswith(("Collective", "Assert"))]
        )
    with tf.control_dependencies(results), tf.device("/cpu:0"):
        progress.assign_add([0, 1, -bound.key, 0], read_value=False)
    return results


def _run_in_session(
    bound: _Bound, tensors: Sequence[tf.Tensor], *, may_hold: bool
) -> list[tf.Tensor]:
    """Calls the collectives through Python.

    A ``tf.numpy_function`` holds one of the session's threads until all ranks have
    entered. Ranks start independent collectives in different orders, so with as many
    of them as threads no rank would reach the one in which another rank waits. One
    such op per graph is safe, as nothing that it depends on waits for it, and is the
    fastest; the rest are called from a dataset, which runs on a thread of its own.
    """

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        with _tf_compat.eager_mode():
            return [result.numpy() for result in bound.run(arrays, blocks=False)]

    dtypes = [spec.dtype for spec in bound.specs]
    shapes = [spec.shape for spec in bound.specs]
    graph = _outermost_graph()
    # Ranks may build named ones in different orders, and would hold different ones.
    if may_hold and graph not in bound.group.holding_threads:
        bound.group.holding_threads.add(graph)
        got = list(tf.numpy_function(call, tensors, dtypes))
        for tensor, shape in zip(got, shapes, strict=True):
            tensor.set_shape(shape)
        return got
    traced = tf.function(
        lambda *given: tf.numpy_function(call, given, dtypes),
        input_signature=bound.specs,
        autograph=False,
    )
    # TensorFlow takes what is outside of a function in the global graph for eager, and
    # would place the call on a task, which a session without a server has not.
    with graph.as_default():
        function = traced.get_concrete_function()
    dataset = tf.raw_ops.MapDataset(
        input_dataset=tf.raw_ops.TensorDataset(
            components=tensors, output_shapes=shapes
        ),
        other_arguments=[],
        f=function,
        output_types=dtypes,
        output_shapes=shapes,
        use_inter_op_parallelism=False,  # The function runs on the dataset's thread.
    )
    return list(
        tf.raw_ops.DatasetToSingleElement(
            dataset=dataset, output_types=dtypes, output_shapes=shapes
        )
    )


def _outermost_graph() -> Any:
    """Returns the graph of the function being traced, not of one of its branches."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        outer = graph.outer_graph
        if not hasattr(outer, "outer_graph"):
            break
        graph = outer
    return graph


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


def find_bucket(length: tf.Tensor) -> tf.Tensor:
    """Returns the index of the smallest bucket that holds ``length``, int32 []."""
    return tf.searchsorted(BUCKETS, [length], side="left")[0]


def pad(tensor: tf.Tensor, bucket: tf.Tensor) -> tf.Tensor:
    """Pads axis 0 of [R, ...] with zeros to a bucket's length."""
    missing = tf.gather(BUCKETS, bucket) - tf.shape(tensor)[0]
    return tf.pad(tensor, [[0, missing], *([[0, 0]] * (tensor.shape.rank - 1))])


def compare_shapes(
    tensor: tf.Tensor,
    group: ProcessGroup,
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
    told = gather(own[None, :10], group, key)
    sizes, shapes = told[:, 0], told[:, 1:]
    compared = shapes[:, 1 + axis :] if axis else shapes
    differs = tf.reduce_any(compared != compared[tf.argmax(sizes)], axis=1)
    if skips_empty:
        differs &= sizes > 0
    says = f"all ranks must bring one shape to {to!r}; by rank they bring"
    with tf.device("/cpu:0"):
        known = shapes[:, 1 : 1 + tf.reduce_max(shapes[:, 0])]
        alike = tf.logical_not(tf.reduce_any(differs))
        check = tf.debugging.Assert(alike, [says, known], summarize=1 << 10)
    with tf.control_dependencies([check]):
        return tf.reduce_max(sizes)


def gather_rows(
    tensors: Sequence[tf.Tensor], group: ProcessGroup, key: Any
) -> list[tf.Tensor]:
    """Concatenates [R, ...] of all ranks in rank order; R may differ by rank.

    Returns [sum of R, ...] per tensor, then R of each rank, int32 [size]. Needs
    1 + KEYS_PER_LENGTH * len(tensors) keys, of which ``key`` is the first.
    """
    own = tf.shape(tensors[0])[:1]
    counts = gather(own, group, key)
    bucket = find_bucket(tf.reduce_max(counts))
    kept = tf.reshape(tf.sequence_mask(counts, tf.gather(BUCKETS, bucket)), [-1])
    first = key + 1 + bucket
    joined = [
        tf.boolean_mask(
            gather(pad(tensor, bucket), group, first + n * KEYS_PER_LENGTH), kept
        )
        for n, tensor in enumerate(tensors)
    ]
    return [*joined, counts]


def send(tensor: tf.Tensor, group: ProcessGroup, key: Any) -> tf.Tensor:
    """Sends a tensor to all other ranks, which ``receive`` it; returns it."""
    return tf.raw_ops.CollectiveBcastSendV2(
        input=tensor,
        group_size=group.size,
        group_key=GROUP_KEY,
        instance_key=key,
        communication_hint="auto",
    )


def receive(
    shape: tf.TensorShape, dtype: tf.DType, group: ProcessGroup, key: Any
) -> tf.Tensor:
    """Returns the tensor that another rank sends."""
    return tf.raw_ops.CollectiveBcastRecvV2(
        group_size=group.size,
        group_key=GROUP_KEY,
        instance_key=key,
        shape=shape,
        T=dtype,
        communication_hint="auto",
    )

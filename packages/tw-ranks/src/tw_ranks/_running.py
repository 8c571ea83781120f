"""Runs exchanges of TensorFlow's eager runtime, from each mode.

    tf.function      the ops are part of the function; an op before and an op after them
                     count, so that the side channel knows how far this rank is
    eager            the same ops, compiled into a function of their own
    session graph    an op calls such a function through Python: neither a plain local
                     session nor a server's has an eager runtime of its own
    all, over MPI    one call from Python, whose body runs eagerly; a function makes it
                     as a session does

Each exchange is described first, and all ranks agree on it (``_agreement.py``). The
keys by which TensorFlow matches the ops of different processes follow from that.
"""

import contextlib
import itertools
import logging
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
from tw_ranks import _tf_compat
from tw_ranks._agreement import PROOF, Exchange
from tw_ranks._collectives import KEYS_PER_TENSOR, add_up, as_tensor, by_nccl
from tw_ranks._engines.gpus import find_sharers, identify_gpu
from tw_ranks._engines.mpi import MAX_COMMUNICATORS
from tw_ranks._group import ProcessGroup

_log = logging.getLogger(__name__)
_PROVEN_LENGTHS = (1, 4_099, 1 << 18)

Body = Callable[[list[tf.Tensor], list[int]], list[tf.Tensor]]
"""Takes this rank's tensors, and the first key of each; returns the results.

A tensor of known shape has two keys, any other KEYS_PER_TENSOR.
"""


@without_autograph
def run_collectives(
    body: Body,
    tensors: Sequence[tf.Tensor],
    *,
    group: ProcessGroup,
    exchange: Exchange,
    specs: Sequence[tf.TensorSpec] = (),
    find_weight: Callable[[list[tf.Tensor]], tf.Tensor] | None = None,
    by_nccl: bool | None = None,
) -> list[tf.Tensor]:
    """Runs collectives in the caller's mode.

    ``specs`` describe inputs and results, by default those of ``tensors``. In exchanges
    that finished ranks join with -0.0, ``find_weight`` returns the weight of all ranks,
    [1], from the results. ``by_nccl`` is whether NCCL carries it; by default, if it is
    the group's engine and a function is traced: only there its order is the program's.
    """
    specs = specs or [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
    if by_nccl is None and traces_function() and group.engine == "nccl":
        if not group.calls.is_proven:
            prove_nccl(group)
        by_nccl = group.engine == "nccl"
    uses_nccl = bool(by_nccl)
    if uses_nccl:
        exchange = exchange.carried_by_nccl()
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
    is_named = bool(exchange.name) and not uses_nccl  # NCCL has one order for all.
    first_key = group.calls.note_use(
        exchange,
        graph,
        num_keys,
        by_name=is_named and graph is not None,
    )
    needs_all = find_weight is None
    bound = _Bound(
        body,
        specs,
        [first_key + n for n in offsets],
        group,
        needs_all=needs_all,
        uses_nccl=uses_nccl,
        shares_communicator=graph is None
        and needs_all
        and group.calls.num_described > MAX_COMMUNICATORS,
    )
    if find_weight is not None:
        group.calls.of_step[first_key] = (bound, find_weight)
    if builds_session_graph() or (traces_function() and group.mpi is not None):
        return _run_on_host(bound, tensors, exchange.name)
    if traces_function():
        return _run_in_function(bound, tensors, is_ordered=not is_named)
    return bound.run(tensors)


def prove_nccl(group: ProcessGroup) -> None:
    """Adds whole numbers by NCCL, which must be exact on all ranks.

    Otherwise an engine that was chosen for the user falls back to TensorFlow's ring,
    and one that was asked for raises RuntimeError. NCCL is not tried where ranks share
    a GPU: it refuses that, and TensorFlow then refuses all collectives.
    """
    group.calls.is_proven = True
    uuids = np.zeros([group.size, 2], np.int64)
    uuids[group.rank] = np.frombuffer(identify_gpu().ljust(16, b"\0"), np.int64)
    with tf.init_scope():
        [told] = _add_now(group, [uuids], "GPUs", by_nccl=False)
        if sharing := find_sharers(np.asarray(told)):
            why = f"ranks {' and '.join(map(str, sharing))} share a GPU"
        elif wrong := _count_wrong(group):
            why = f"NCCL added whole numbers wrongly on {wrong} of {group.size} ranks"
        else:
            return
    group.engine = "tensorflow"
    if not group.falls_back:
        raise RuntimeError(
            f'join: engine="nccl" cannot be: {why}. Join with engine="tensorflow".'
        )
    group.engine_reason = why
    _log.warning("join: engine 'tensorflow' in place of 'nccl', as %s.", why)


def _count_wrong(group: ProcessGroup) -> int:
    """Adds by NCCL; returns on how many ranks sums were wrong, told by the ring."""
    numbers = [np.arange(n, dtype=np.float32) % 251 for n in _PROVEN_LENGTHS]
    brought = [array * np.float32(group.rank + 1) for array in numbers]
    sums = _add_now(group, brought, "sums", by_nccl=True)
    total = group.size * (group.size + 1) // 2
    is_wrong = any(
        not np.array_equal(np.asarray(got), array * total)
        for got, array in zip(sums, numbers, strict=True)
    )
    [count] = _add_now(group, [np.array([int(is_wrong)])], "result", by_nccl=False)
    return int(count[0])


def _add_now(
    group: ProcessGroup, arrays: Sequence[np.ndarray], what: str, *, by_nccl: bool
) -> list[tf.Tensor]:
    """Adds all ranks' arrays for a proof."""
    return run_collectives(
        lambda given, keys: [
            add_up(tensor, group, key, "Add")
            for tensor, key in zip(given, keys, strict=True)
        ],
        [tf.constant(array) for array in arrays],
        group=group,
        exchange=Exchange(PROOF, (), options=(("part", what),)),
        by_nccl=by_nccl,
    )


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
        uses_nccl: bool,
        shares_communicator: bool,
    ) -> None:
        """Takes arguments of ``run_collectives``, and the first key of each tensor."""
        self.group = group
        self.specs = list(specs)
        self.key = keys[0]
        self._body, self._keys = body, keys
        self.uses_nccl = uses_nccl  # Which needs one order on all ranks.
        self.needs_all = needs_all  # Including ranks that have finished.
        self._shares_communicator = shares_communicator

    def build(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Builds the ops in the current graph."""
        # A group has one device per rank, whichever logical CPU the caller uses.
        has_gpu = bool(tf.config.list_logical_devices("GPU"))
        if self.group.mpi is not None:
            with tf.device("/cpu:0") if has_gpu else contextlib.nullcontext():
                return self._body(list(tensors), self._keys)
        place = contextlib.nullcontext() if has_gpu else tf.device("/cpu:0")
        engine = "nccl" if self.uses_nccl else "tensorflow"
        scope = tf.name_scope(f"by_{engine}")  # Timelines show it.
        with place, scope, by_nccl(self.uses_nccl):
            return self._body(list(tensors), self._keys)

    def run(
        self, tensors: Sequence[Any], *, blocks: bool = True, order: str = ""
    ) -> list[tf.Tensor]:
        """Runs them now, eagerly; see ``Calls.host_call``."""
        calls = self.group.calls
        call = calls.host_call(
            self.key, blocks=blocks, needs_all=self.needs_all, order=order
        )
        if self.group.mpi is not None:
            brought = [t if tf.is_tensor(t) else as_tensor(t) for t in tensors]
            shapes = [(t, s.shape) for t, s in zip(brought, self.specs, strict=True)]
            in_order = self._shares_communicator
            with self.group.mpi.exchange(self.key, shapes, in_order=in_order), call:
                return self.build(brought)

        def trace() -> Any:
            traced = tf.function(
                lambda *brought: self.build(brought),
                input_signature=self.specs,
                autograph=False,
            )
            return traced.get_concrete_function()

        _ = calls.progress  # Made here, as a function that makes it is traced twice.
        compiled = calls.compile(self.key, trace)
        with call:
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


def _run_in_function(
    bound: _Bound, tensors: Sequence[tf.Tensor], *, is_ordered: bool
) -> list[tf.Tensor]:
    progress, graph = bound.group.calls.progress, tf.compat.v1.get_default_graph()
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


def _run_on_host(
    bound: _Bound, tensors: Sequence[tf.Tensor], name: str
) -> list[tf.Tensor]:
    """Calls the collectives through Python.

    A ``tf.numpy_function`` holds one of TensorFlow's threads until all ranks have
    entered. Ranks start independent collectives in different orders, so with as many
    of them as threads no rank would reach the one in which another rank waits. One
    such op per graph is safe, as nothing that it depends on waits for it, and is the
    fastest; the rest are called from a dataset, which runs on a thread of its own. In a
    function they run one after another, unless they have names.
    """
    graph, in_function = _outermost_graph(), traces_function()
    order, over_mpi = name if in_function else "", bound.group.mpi is not None

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        with _tf_compat.eager_mode():
            results = bound.run(arrays, blocks=in_function, order=order)
            # Of TensorFlow's ops, some return their input, which is the caller's.
            read = _tf_compat.as_array if over_mpi else np.array
            return [read(result) for result in results]

    dtypes = [spec.dtype for spec in bound.specs]
    shapes = [spec.shape for spec in bound.specs]
    # Ranks may build named ones in different orders, and would hold different ones.
    holding = bound.group.calls.holding_threads
    if not name and (in_function or graph not in holding):
        holding.add(graph)
        # Timelines show the name.
        with tf.name_scope("by_mpi") if over_mpi else contextlib.nullcontext():
            got = list(tf.numpy_function(call, tensors, dtypes))
        for tensor, shape in zip(got, shapes, strict=True):
            tensor.set_shape(shape)
        return got
    traced = tf.function(
        lambda *given: tf.numpy_function(call, given, dtypes),
        input_signature=bound.specs,
        autograph=False,
    )
    current = tf.compat.v1.get_default_graph()
    known = len(current.get_operations())
    # TensorFlow takes what is outside of a function in the global graph for eager, and
    # would place the call on a task, which a session without a server has not.
    with contextlib.nullcontext() if in_function else graph.as_default():
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
    got = list(
        tf.raw_ops.DatasetToSingleElement(
            dataset=dataset, output_types=dtypes, output_shapes=shapes
        )
    )
    _tf_compat.run_independently(current, current.get_operations()[known:])
    return got


def _outermost_graph() -> Any:
    """Returns the graph of the function being traced, not of one of its branches."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        outer = graph.outer_graph
        if not hasattr(outer, "outer_graph"):
            break
        graph = outer
    return graph

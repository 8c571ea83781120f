"""Runs exchanges in TensorFlow's eager runtime, from each mode.

    tf.function      the ops are part of the function; an op before and an op after them
                     count, so that the side channel knows how far this rank is
    eager            the same ops, compiled into their own function
    session graph    an op calls such a function through Python: neither a plain local
                     session nor a server's has an eager runtime of its own
    all, over MPI    one call from Python, whose body runs eagerly; a function makes it
                     as a session does

Each exchange is described first, and all ranks agree on it (``_agreement.py``). The
keys by which TensorFlow matches the ops of different processes follow from that.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core.internal import (
    builds_session_graph,
    compiles_with_xla,
    run_independently,
    traces_function,
    without_autograph,
)
from tw_ranks import _tf_compat
from tw_ranks._agreement import PROOF, Exchange
from tw_ranks._endpoint.endpoint import Endpoint
from tw_ranks._engines import nccl
from tw_ranks._engines.mpi import MAX_COMMUNICATORS
from tw_ranks._exchanges.collectives import KEYS_PER_TENSOR, add_up, as_tensor, by_nccl

Body = Callable[[list[tf.Tensor], list[int]], list[tf.Tensor]]
"""Takes this rank's tensors, and the first key of each; returns the results.

A tensor of known shape has two keys, any other KEYS_PER_TENSOR.
"""

FindWeight = Callable[[list[tf.Tensor]], tf.Tensor]
"""Finds the weight of all ranks, [1], in the results."""


@without_autograph
def run_collectives(
    body: Body,
    tensors: Sequence[tf.Tensor],
    *,
    endpoint: Endpoint,
    exchange: Exchange,
    specs: Sequence[tf.TensorSpec] = (),
    find_weight: FindWeight | None = None,
    by_nccl: bool | None = None,
) -> list[tf.Tensor]:
    """Runs collectives in the caller's mode.

    ``specs`` describe inputs and results, by default those of ``tensors``. In exchanges
    that finished ranks join with -0.0, ``find_weight`` returns the weight of all ranks,
    [1], from the results. ``by_nccl`` says whether NCCL carries it; by default, if it
    is the group's engine and a function is traced: only there its order is the
    program's.
    """
    specs = list(specs) or [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
    uses_nccl = _can_use_nccl(endpoint) if by_nccl is None else by_nccl
    if uses_nccl:
        exchange = exchange.carried_by_nccl()
    graph = None
    if not tf.executing_eagerly():
        _refuse_xla()
        graph = _outermost_graph()
    counts = [2 if s.shape.is_fully_defined() else KEYS_PER_TENSOR for s in specs]
    *offsets, num_keys = itertools.accumulate(counts, initial=0)
    is_named = bool(exchange.name) and not uses_nccl  # NCCL has one order for all.
    first_key = endpoint.keys.note_use(
        exchange, graph, num_keys, by_name=is_named and graph is not None
    )
    has_many = endpoint.keys.num_described > MAX_COMMUNICATORS
    engine = "nccl" if uses_nccl else "tensorflow" if endpoint.mpi is None else "mpi"
    bound = Bound(
        *(body, specs, [first_key + n for n in offsets], endpoint),
        uses_nccl=uses_nccl,
        find_weight=find_weight,
        shares_communicator=graph is None and find_weight is None and has_many,
        scope=exchange.scope(engine),
    )
    if find_weight is not None:
        endpoint.built.add_to_step(first_key, bound)
    if traces_function() and not uses_nccl and endpoint.mpi is None:
        endpoint.progress.note_independent(first_key, graph)
    if builds_session_graph() or (traces_function() and endpoint.mpi is not None):
        return _run_on_host(bound, tensors, exchange.name)
    if traces_function():
        return _run_in_function(bound, tensors)
    try:
        return bound.run(tensors)
    finally:
        endpoint.reports.hear_interrupt()  # MPI defers Ctrl-C until the exchange ends.


def _can_use_nccl(endpoint: Endpoint) -> bool:
    """Whether NCCL carries the exchange; tests NCCL before its first use."""
    carrier = endpoint.carrier
    if not traces_function() or carrier.engine.name != "nccl":
        return False
    if not carrier.is_proven:
        prove_nccl(endpoint)
    return carrier.engine.name == "nccl"  # The proof may have failed.


def prove_nccl(endpoint: Endpoint) -> None:
    """Adds whole numbers by NCCL, which must be exact on all ranks."""

    def add(arrays: Sequence[np.ndarray], what: str, by_nccl: bool) -> list[tf.Tensor]:
        return run_collectives(
            lambda given, keys: [
                add_up(tensor, endpoint, key, "Add")
                for tensor, key in zip(given, keys, strict=True)
            ],
            [tf.constant(array) for array in arrays],
            endpoint=endpoint,
            exchange=Exchange(PROOF, (), options=(("part", what),)),
            by_nccl=by_nccl,
        )

    with tf.init_scope():
        endpoint.carrier.prove(
            lambda: nccl.find_fault(endpoint.rank, endpoint.size, add)
        )


@dataclass(frozen=True, eq=False)
class Bound:
    """Collectives with their keys, compiled when they are first called from Python."""

    body: Body
    specs: Sequence[tf.TensorSpec]
    keys: list[int]  # The first of each tensor.
    endpoint: Endpoint
    uses_nccl: bool  # Which needs one order on all ranks.
    find_weight: FindWeight | None  # None if ranks that have finished do not join it.
    shares_communicator: bool  # Of MPI, with others that run in the program's order.
    scope: str  # In timelines: the engine, and the first tensor.

    @property
    def key(self) -> int:
        """The first of all its keys."""
        return self.keys[0]

    @property
    def needs_all(self) -> bool:
        """Whether it needs ranks that have finished, too."""
        return self.find_weight is None

    def build(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Builds the ops in the current graph."""
        # A group has one device per rank, whichever logical CPU the caller uses.
        has_gpu = bool(tf.config.list_logical_devices("GPU"))
        if self.endpoint.mpi is not None:
            with tf.device("/cpu:0") if has_gpu else contextlib.nullcontext():
                return self.body(list(tensors), self.keys)
        place = contextlib.nullcontext() if has_gpu else tf.device("/cpu:0")
        with place, tf.name_scope(self.scope), by_nccl(self.uses_nccl):
            return self.body(list(tensors), self.keys)

    def run(
        self, tensors: Sequence[Any], *, blocks: bool = True, order: str = ""
    ) -> list[tf.Tensor]:
        """Runs them now, eagerly; see ``Progress.host_call``."""
        call = self._count_call(blocks=blocks, order=order)
        if self.endpoint.mpi is not None:
            brought = [t if tf.is_tensor(t) else as_tensor(t) for t in tensors]
            shapes = [(t, s.shape) for t, s in zip(brought, self.specs, strict=True)]
            in_order = self.shares_communicator
            with self.endpoint.mpi.exchange(self.key, shapes, in_order=in_order), call:
                return self.build(brought)

        def trace() -> Any:
            traced = tf.function(
                lambda *brought: self.build(brought),
                input_signature=self.specs,
                autograph=False,
            )
            return traced.get_concrete_function()

        # Made here: a function that made it would be traced twice.
        _ = self.endpoint.progress.variable
        compiled = self.endpoint.built.compile(self.key, trace)
        with call:
            return list(compiled(*tensors))

    @contextlib.contextmanager
    def _count_call(self, *, blocks: bool, order: str) -> Iterator[None]:
        progress, reports = self.endpoint.progress, self.endpoint.reports
        with (
            progress.host_call(
                self.key, blocks=blocks, needs_all=self.needs_all, order=order
            ) as number,  # Several at once in a session.
            reports.naming_missing(f"host call {number}"),
        ):
            yield

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


def _run_in_function(bound: Bound, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    progress = bound.endpoint.progress
    marks = partial(progress.marks, bound.key, needs_all=bound.needs_all)
    graph = tf.compat.v1.get_default_graph()
    with tf.control_dependencies(tensors), tf.device("/cpu:0"):
        progress.variable.assign_add(marks(begins=True), read_value=False)
    known = len(graph.get_operations())
    results = bound.build(tensors)
    if not bound.uses_nccl:
        # A function runs collectives in program order, after each other and after all
        # that has side effects, such as a print in the backward pass. That would hide
        # none of the network; and the order may differ where names match them.
        made = graph.get_operations()[known:]
        run_independently(
            graph, [op for op in made if op.type.startswith(("Collective", "Assert"))]
        )
    with tf.control_dependencies(results), tf.device("/cpu:0"):
        progress.variable.assign_add(marks(begins=False), read_value=False)
    return results


def _run_on_host(
    bound: Bound, tensors: Sequence[tf.Tensor], name: str
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
    order, over_mpi = name if in_function else "", bound.endpoint.mpi is not None

    def call(*arrays: np.ndarray) -> list[np.ndarray]:
        with _tf_compat.eager_mode():
            results = bound.run(arrays, blocks=in_function, order=order)
            # Some of TensorFlow's ops return their input, which is the caller's.
            read = _tf_compat.as_array if over_mpi else np.array
            return [read(result) for result in results]

    dtypes = [spec.dtype for spec in bound.specs]
    shapes = [spec.shape for spec in bound.specs]
    # Ranks may build named ones in different orders, and would hold different ones.
    may_hold = not name and (bound.endpoint.built.hold_thread(graph) or in_function)
    if may_hold:
        with tf.name_scope(bound.scope) if over_mpi else contextlib.nullcontext():
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
    # TensorFlow treats code outside of a function in the global graph as eager, and
    # would place the call on a task, which a session without a server lacks.
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
    run_independently(current, current.get_operations()[known:])
    return got


def _refuse_xla() -> None:
    if compiles_with_xla():
        raise ValueError(
            "Collectives between processes cannot be compiled by XLA; trace the step "
            "with jit_compile=False (in Keras: compile(jit_compile=False))."
        )


def _outermost_graph() -> Any:
    """Returns the graph of the function being traced, or of the session's.

    Not of one of its branches: in it, all exchanges need keys of their own.
    """
    graph = tf.compat.v1.get_default_graph()
    in_session = builds_session_graph()
    while (outer := getattr(graph, "outer_graph", None)) is not None:
        if not in_session and not hasattr(outer, "outer_graph"):
            break  # Eager mode's.
        graph = outer
    return graph

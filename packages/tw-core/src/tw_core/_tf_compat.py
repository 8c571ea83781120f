"""TensorFlow internals that this package needs beyond the public API."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import (
    atomic_function,
    autograph_util,
    polymorphic_function,
)
from tensorflow.python.framework import auto_control_deps_utils, func_graph, ops
from tensorflow.python.framework.kernels import get_all_registered_kernels
from tensorflow.python.ops import cond_v2, resource_variable_ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

__all__ = ["SaveSpec", "SaveableObject"]  # of TensorFlow


def in_body() -> bool:
    """Returns whether new ops are inside a branch, a loop or a function.

    TensorFlow's older control flow, which ``disable_v2_behavior()`` restores, has no
    function bodies, and its contexts have no public name.
    """
    graph = tf.compat.v1.get_default_graph()
    return bool(tf.inside_function() or control_flow_context(graph))


def control_flow_context(graph: tf.Graph) -> object:
    """Returns the branch or loop of TensorFlow 1 that is being built, if any."""
    return graph._get_control_flow_context()


class _PartOfGraph:
    """Some operations of a function's graph, presented as a whole graph."""

    _output_names = None

    def __init__(
        self,
        graph: tf.Graph,
        operations: Sequence[tf.Operation],
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
        effects: Sequence[tf.Operation],
    ) -> None:
        self._graph, self._operations = graph, operations
        self.inputs, self.outputs = list(inputs), list(outputs)
        self.control_outputs = list(effects)
        # Tensors that the whole graph captured are among the inputs.
        self.function_captures = func_graph.FuncGraph(graph.name).function_captures

    def get_operations(self) -> Sequence[tf.Operation]:
        return self._operations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def function_of_part(
    graph: tf.Graph,
    operations: Sequence[tf.Operation],
    *,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    effects: Sequence[tf.Operation],
    inline: bool,
    jit_compile: bool,
) -> Callable[..., Sequence[tf.Tensor]]:
    """Makes a function of some operations of a function's graph, which stay there.

    ``operations`` are in build order, ``inputs`` are tensors of others that they use;
    ``effects`` run in every call. They keep their names, devices and stack traces.
    Control inputs from operations outside the part are removed permanently. The
    function's results cannot be differentiated.
    """
    own = set(operations)
    for op in operations:
        kept = [other for other in op.control_inputs if other in own]
        if len(kept) < len(op.control_inputs):
            op._remove_all_control_inputs()
            op._add_control_inputs(kept)
    part = _PartOfGraph(graph, operations, inputs, outputs, effects)
    chosen = {"_noinline": not inline, "_XlaMustCompile": jit_compile}
    attributes = {
        name: attr_value_pb2.AttrValue(b=True)
        for name, is_set in chosen.items()
        if is_set
    }
    name = f"__inference_{graph.name}_{ops.uid()}"
    function = atomic_function.from_func_graph(name, part, attributes)

    def call(*values: tf.Tensor) -> Sequence[tf.Tensor]:
        results: Sequence[tf.Tensor]
        with nullcontext() if inline else _optimized_by_caller():
            results = function.call_flat(*values)
        if results:
            record.record_operation("part", results, values, _refuse_gradient)
            results[0].op._gradient_function = _refuse_gradient
        return results

    return call


@contextmanager
def _optimized_by_caller() -> Iterator[None]:
    """Keeps the runtime from optimizing a called function again on every device.

    Grappler optimizes the functions that a function calls together with the caller,
    once. For a call that is not inlined the function is optimized again at its first
    run, for each device, which took half of a first step and made no later one faster.
    """
    runtime = context.context()
    options = runtime.function_call_options
    config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    runtime.function_call_options = context.FunctionCallOptions(
        options.executor_type, config
    )
    try:
        yield
    finally:
        runtime.function_call_options = options


def _refuse_gradient(*_: Any) -> Any:
    raise RuntimeError(
        "tw_core: a function that was traced once for all towers cannot be "
        "differentiated from outside; take the gradients in the function, or use "
        "trace='each'."
    )


def is_variable_handle(tensor: tf.Tensor) -> bool:
    """Returns whether a resource is known to be a variable, not a table or the like."""
    return bool(getattr(getattr(tensor, "_handle_data", None), "is_set", False))


def spec_of_handle(handle: tf.Tensor) -> tuple[tf.TensorShape, tf.DType]:
    """Returns the shape and dtype of the variable behind a handle."""
    (own,) = handle._handle_data.shape_and_type
    return tf.TensorShape(own.shape), tf.as_dtype(own.dtype)


def unnoticed_variable(value: tf.Tensor, shape: tf.TensorShape) -> tf.Variable:
    """Makes a variable that the function being traced does not notice.

    TensorFlow traces a function that makes variables again, and then refuses new ones.
    """
    return resource_variable_ops.ResourceVariable(value, trainable=False, shape=shape)


def written_by(op: tf.Operation) -> list[tf.Tensor]:
    """Returns the resources among an operation's inputs that it may write to."""
    if not any(tensor.dtype == tf.resource for tensor in op.inputs):
        return []
    _, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return list(writes)


def read_only_inputs(graph: tf.Graph) -> list[tf.Tensor]:
    """Returns the resources among a function's inputs that it only reads."""
    find = auto_control_deps_utils.get_read_only_resource_input_indices_graph
    return [graph.inputs[index] for index in find(graph)]


def captured_from(graph: tf.Graph) -> dict[int, tf.Tensor]:
    """Maps the id of each captured tensor in a function to the tensor outside."""
    pairs = getattr(graph, "captures", ())
    return {id(inside): outside for outside, inside in pairs}


_FUNCTIONS = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
}


def functions_of(op: tf.Operation) -> list[Any]:
    """Returns the graphs of the function that an op calls, or of its branches.

    Their inputs are the last ones of the op. Empty if one of them is unknown.
    """
    if op.type in ("Case", "StatelessCase"):
        named = op.get_attr("branches")
    else:
        named = [op.get_attr(name) for name in _FUNCTIONS.get(op.type, ())]
    known = [op.graph._get_function(own.name) for own in named]
    graphs = [getattr(own, "graph", None) for own in known]
    return [] if None in graphs else graphs


def devices_of_runtime() -> list[str] | None:
    """Returns the names of the eager runtime's devices; None before it has started.

    Does not start it: that would take the memory of GPUs.
    """
    runtime = context.context_safe()
    if runtime is None or not runtime._initialized:
        return None
    return [device.name for device in runtime.list_logical_devices()]


def in_xla_context(graph: tf.Graph) -> bool:
    """Returns whether ``graph``, or a graph around it, is being compiled by XLA."""
    return bool(GraphOrParentsInXlaContext(graph))


@cache
def compiled_types() -> frozenset[str]:
    """Lists the types of operations that XLA compiles; empty where unknown."""
    with tf.init_scope(), tf.device("/cpu:0"):
        # XLA registers its kernels when it first compiles.
        tf.function(lambda: tf.zeros([]), autograph=False, jit_compile=True)()
    every = get_all_registered_kernels().kernel
    return frozenset(own.op for own in every if own.device_type == "XLA_CPU_JIT")


def set_initializer(
    variable: tf.Variable, initializer: tf.Operation, value: tf.Tensor | None = None
) -> None:
    """Replaces ``variable.initializer``, the op that initialisers run."""
    variable._initializer_op = initializer
    if value is not None:
        variable._initial_value = value


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces an input of an op, as TensorFlow does to close its loops."""
    op._update_input(index, tensor)


def set_seed(op: tf.Operation, seed: int) -> None:
    """Replaces a random op's own seed, ``seed2``."""
    op._set_attr("seed2", attr_value_pb2.AttrValue(i=seed))


def with_gradient(
    results: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    gradient: Callable[..., Sequence[Any]],
) -> list[tf.Tensor]:
    """Returns tensors with a custom gradient.

    Like ``tf.custom_gradient``, except that in a graph the op itself holds the
    function: TensorFlow's registers one per trace, permanently and under a new name, so
    that no such trace is ever freed.

    Args:
      results: [M], at least one.
      inputs: [N] tensors to differentiate by; gradients flow back only through these.
      gradient: maps [M] gradients of the results to [N] of the inputs, or None each.

    Returns:
      [M] tensors equal to the results.
    """
    given = [*results, *inputs]

    def backward(*upstream: Any) -> list[Any]:
        return [*[None for _ in results], *gradient(*upstream[: len(results)])]

    with record.stop_recording():
        passed: list[tf.Tensor] = tf.identity_n(given)
    if not tf.executing_eagerly():
        passed[0].op._gradient_function = lambda op, *upstream: backward(*upstream)
    record.record_operation("with_gradient", passed, given, backward)
    return passed[: len(results)]


_BODIES = ((cond_v2, "cond_v2"), (polymorphic_function.Function, "__call__"))
_replacing = threading.Lock()
_users: list[object] = []  # of the replacements


@contextmanager
def replaced_bodies(*wrappers: Callable[..., Any]) -> Iterator[None]:
    """Replaces ``tf.cond`` and calls of functions by wrappers, in every thread.

    Each wrapper takes TensorFlow's function as its first argument. TensorFlow has no
    hook that runs before a body is traced. The last user to exit restores the
    originals; all users must pass the same wrappers.
    """
    me = object()
    with _replacing:
        if not _users:
            for (owner, name), wrapper in zip(_BODIES, wrappers, strict=True):
                setattr(owner, name, _around(getattr(owner, name), wrapper))
        _users.append(me)
    try:
        yield
    finally:
        with _replacing:
            _users.remove(me)
            if not _users:
                for owner, name in _BODIES:
                    setattr(owner, name, getattr(owner, name).__wrapped__)


def _around(own: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def call(*arguments: Any, **named: Any) -> Any:
        return wrapper(own, *arguments, **named)

    return call


@contextmanager
def apart_from_other_traces() -> Iterator[None]:
    """Makes functions trace again that were traced elsewhere for the same arguments.

    TensorFlow caches traces separately where a device function is open.
    """
    graph = tf.compat.v1.get_default_graph()
    with nullcontext() if tf.executing_eagerly() else graph.device(_own_device):
        yield


def _own_device(op: tf.Operation) -> str:
    return str(op.device)


def inlined(function: Any) -> Callable[..., Any]:
    """Returns a ``tf.function``'s Python function, converted by AutoGraph if it is."""
    plain: Callable[..., Any] = function.python_function
    if not function._autograph:
        return plain
    # From its first trace on, a bound method's function is a converted one.
    converted = autograph_util.py_func_from_autograph(plain)

    def call(*arguments: Any, **named: Any) -> Any:
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
            return converted(*arguments, **named)

    return call


def outermost_function_graph() -> tf.Graph:
    """Returns the graph of the trace in progress, even while a body is built."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph


def run_independently(graph: tf.Graph, operations: Sequence[tf.Operation]) -> None:
    """Exempts ops from the order in which a traced function runs its ops."""
    dependencies: Any = getattr(graph, "experimental_acd_manager", None)
    if dependencies is not None:
        for operation in operations:
            dependencies.run_independently(operation)

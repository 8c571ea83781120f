"""TensorFlow internals that this package needs beyond the public API."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, record
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

__all__ = [
    "SaveSpec",
    "SaveableObject",
    "control_flow_context",
    "devices_of_runtime",
    "function_devices",
    "in_xla_context",
    "outermost_function_graph",
    "read_profile",
    "set_initializer",
    "set_input",
    "with_gradient",
]


def control_flow_context(graph: tf.Graph) -> object:
    """Returns the branch or loop of TensorFlow 1 that is being built, if any."""
    return graph._get_control_flow_context()


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


def outermost_function_graph() -> tf.Graph:
    """Returns the graph of the trace in progress, whatever body is being built."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph


def function_devices(name: str) -> dict[str, str]:
    """Maps the name of each op of a function that requests a device to that device.

    Ops of functions that it calls have the names that they get when inlined.
    """
    try:
        definition = context.context().get_function_def(name)
    except tf.errors.NotFoundError:  # freed in the meantime
        return {}
    found = {node.name: node.device for node in definition.node_def if node.device}
    for node in definition.node_def:
        if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            inner = function_devices(node.attr["f"].func.name)
            found |= {f"{node.name}/{op}": device for op, device in inner.items()}
    return found


def read_profile(folder: Path) -> Any:
    """Returns the ``XSpace`` that the profiler wrote into a folder."""
    # Only TensorFlow has the schema; imported here, only where something is recorded.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    for path in sorted(folder.glob("**/*.xplane.pb")):
        space.MergeFromString(path.read_bytes())
    return space

"""What is needed of TensorFlow beyond its public names."""

from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
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


def set_initializer(variable: tf.Variable, initializer: tf.Operation) -> None:
    """Has ``variable.initializer``, which initialisers run, be another op."""
    variable._initializer_op = initializer


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Has an op take another tensor; TensorFlow closes its loops like this."""
    op._update_input(index, tensor)


def outermost_function_graph() -> tf.Graph:
    """Returns the graph of the trace in progress, whatever body is being built."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    return graph


def function_devices(name: str) -> dict[str, str]:
    """Returns the devices that a function's ops ask for, of those that do, by op.

    The ops of functions that it calls are named as TensorFlow does when it puts them
    in place of the call.
    """
    try:
        definition = context.context().get_function_def(name)
    except tf.errors.NotFoundError:  # it has gone since
        return {}
    found = {node.name: node.device for node in definition.node_def if node.device}
    for node in definition.node_def:
        if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            inner = function_devices(node.attr["f"].func.name)
            found |= {f"{node.name}/{op}": device for op, device in inner.items()}
    return found


def read_profile(folder: Path) -> Any:
    """Returns the ``XSpace`` that the profiler wrote into a folder."""
    # TensorFlow alone knows the format; not imported where nothing is recorded.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    for path in sorted(folder.glob("**/*.xplane.pb")):
        space.MergeFromString(path.read_bytes())
    return space

"""TensorFlow's private modules, wrapped; no other module imports these."""

from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


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

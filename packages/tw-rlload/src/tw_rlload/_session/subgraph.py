"""Copies a part of a session graph into the body of a function.

The operations between given inputs and targets are copied; placeholders and
resource handles (variables, tables, ...) stay the outer ones and are captured.
So a loop can run a step that was built once, outside of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tw_rlload._tf_compat import capture


@dataclass(frozen=True)
class Subgraph:
    """A part of a graph, ready to be copied.

    Attributes:
      graph_def: its nodes.
      outer: tensors that it reads and that stay outside.
      inputs: tensors that a copy replaces.
    """

    graph_def: tf.compat.v1.GraphDef
    outer: tuple[tf.Tensor, ...]
    inputs: tuple[tf.Tensor, ...]


def extract(
    inputs: Sequence[tf.Tensor], targets: Iterable[tf.Tensor | tf.Operation]
) -> Subgraph:
    """Finds what must be computed for ``targets`` once ``inputs`` are there.

    Args:
      inputs: tensors that every copy brings for itself.
      targets: tensors and operations of the same graph.

    Returns:
      The part of the graph.
    """
    operations = _ancestors({t.op for t in inputs}, [_op(t) for t in targets])
    outside = {op for op in operations if _stays_outside(op)}
    names = {op.name for op in operations - outside}
    outer = [t for op in operations & outside for t in op.outputs]
    graph = inputs[0].graph
    return Subgraph(
        _graph_def(graph, names), tuple(sorted(outer, key=_name)), tuple(inputs)
    )


def copy_into_body(
    subgraph: Subgraph,
    replacements: Sequence[tf.Tensor],
    targets: Sequence[tf.Tensor | tf.Operation],
) -> list[tf.Tensor | tf.Operation]:
    """Copies a part of the outer graph into the function that is being built.

    Args:
      subgraph: the part.
      replacements: for each of its inputs, a tensor of the function.
      targets: tensors and operations of the outer graph.

    Returns:
      What stands for each target inside.
    """
    inside: dict[str, tf.Tensor] = {
        tensor.name: capture(tf.compat.v1.get_default_graph(), tensor)
        for tensor in subgraph.outer
    }
    pairs = zip(subgraph.inputs, replacements, strict=True)
    inside.update({tensor.name: new for tensor, new in pairs})
    copied = tf.graph_util.import_graph_def(
        subgraph.graph_def,
        input_map=_used(subgraph.graph_def, inside),
        return_elements=[t.name for t in targets if t.name not in inside],
        name="step",
    )
    fresh = iter(copied)
    return [inside[t.name] if t.name in inside else next(fresh) for t in targets]


def _ancestors(
    stop: set[tf.Operation], targets: Sequence[tf.Operation]
) -> set[tf.Operation]:
    found: set[tf.Operation] = set()
    waiting = list(targets)
    while waiting:
        op = waiting.pop()
        if op in found or op in stop:
            continue
        found.add(op)
        if not _stays_outside(op):
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return found


def _stays_outside(op: tf.Operation) -> bool:
    if op.type in ("Placeholder", "PlaceholderWithDefault"):
        return True
    resources = (tf.resource, tf.variant)
    return not op.inputs and any(t.dtype in resources for t in op.outputs)


def _graph_def(graph: tf.Graph, names: set[str]) -> tf.compat.v1.GraphDef:
    whole = graph.as_graph_def()
    part = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
    for node in whole.node:
        if node.name in names:
            copy = part.node.add()
            copy.CopyFrom(node)
            _forget_others(copy, names)
    return part


def _forget_others(node: tf.compat.v1.NodeDef, names: set[str]) -> None:
    """Removes control inputs and colocations that refer outside of the part."""
    kept = [i for i in node.input if not i.startswith("^") or i[1:] in names]
    del node.input[:]
    node.input.extend(kept)
    if "_class" in node.attr:
        near = [c for c in node.attr["_class"].list.s if c.decode()[5:] in names]
        del node.attr["_class"].list.s[:]
        node.attr["_class"].list.s.extend(near)
        if not near:
            del node.attr["_class"]


def _used(
    graph_def: tf.compat.v1.GraphDef, inside: Mapping[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    # Importing refuses replacements for tensors that no node reads.
    read = {name for node in graph_def.node for name in node.input}
    return {
        name: tensor
        for name, tensor in inside.items()
        if name in read or name.removesuffix(":0") in read
    }


def _op(target: tf.Tensor | tf.Operation) -> tf.Operation:
    return target if isinstance(target, tf.Operation) else target.op


def _name(tensor: tf.Tensor) -> str:
    return str(tensor.name)

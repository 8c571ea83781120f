"""Copies a part of a session graph into the body of a function.

The operations between given inputs and targets are copied; placeholders and
resource handles (variables, tables, ...) stay the outer ones and are captured.
So a loop can run a step that was built once, outside of it.
"""

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tw_rlload._tf_compat import capture


def make_copier(
    inputs: Sequence[tf.Tensor], targets: Sequence[tf.Tensor | tf.Operation]
) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor | tf.Operation]]:
    """Finds the part of a graph that computes ``targets`` from ``inputs``.

    Args:
      inputs: tensors that every copy replaces.
      targets: tensors and operations of the same graph.

    Returns:
      What copies the part into the function that is being built: it takes a tensor of
      the function for each input, and returns what stands for each target inside.
    """
    operations = _ancestors({t.op for t in inputs}, [_op(t) for t in targets])
    outside = {op for op in operations if _stays_outside(op)}
    part = _graph_def(inputs[0].graph, {op.name for op in operations - outside})
    outer = sorted((t for op in outside for t in op.outputs), key=lambda t: str(t.name))

    def copy(replacements: Sequence[tf.Tensor]) -> list[tf.Tensor | tf.Operation]:
        body = tf.compat.v1.get_default_graph()
        inside: dict[str, tf.Tensor] = {t.name: capture(body, t) for t in outer}
        pairs = zip(inputs, replacements, strict=True)
        inside.update({tensor.name: new for tensor, new in pairs})
        copied = tf.graph_util.import_graph_def(
            part,
            input_map=_used(part, inside),
            return_elements=[t.name for t in targets if t.name not in inside],
            name="step",
        )
        fresh = iter(copied)
        return [inside[t.name] if t.name in inside else next(fresh) for t in targets]

    return copy


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

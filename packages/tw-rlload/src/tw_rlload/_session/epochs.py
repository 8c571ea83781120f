"""Whole epochs in one session call: the step, copied into a loop.

The step was built once, outside, as ``optimize`` runs it. The loop's body holds
a copy of the operations between its inputs and its update; placeholders and resource
handles (variables, tables, ...) stay the outer ones and are captured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tw_rlload._loading.plan import LoadPlan
from tw_rlload._loading.specs import is_numeric
from tw_rlload._session.step import SessionStep, loss_of
from tw_rlload._training.loop import (
    LOOP_SPECS,
    LoopFeeds,
    Pick,
    lay_out,
    loop_feeds,
    loop_over_steps,
)
from tw_rlload._training.order import EpochOrder


class SessionEpochs:
    """A loop over steps in a session graph."""

    def __init__(
        self, step: SessionStep, losses: list[tf.Tensor], picks: list[Pick]
    ) -> None:
        """Copies the step into a loop."""
        others = [
            {
                name: value
                for name, value in _leaves(fetches)
                if tf.is_tensor(value)
                and value.shape.rank == 0
                and is_numeric(value.dtype)
            }
            for fetches in step.fetches
        ]
        self.layout, scalars = lay_out(losses, step.weights, others)
        operations = [
            value
            for fetches in step.fetches
            for _, value in _leaves(fetches)
            if isinstance(value, tf.Operation)
        ]
        operations = [step.train_op, *operations]
        self._step = step
        replaced = [tensor for tower in step.inputs for tensor in tower]
        with tf.device("/cpu:0"), tf.name_scope("epochs"):
            placeholder = tf.compat.v1.placeholder
            self._placeholders = LoopFeeds(
                *(
                    placeholder(spec.dtype, spec.shape, name)
                    for name, spec in LOOP_SPECS._asdict().items()
                )
            )
            copy = _make_copier(replaced, [*operations, *scalars])

            def copied(rows: list[list[tf.Tensor]]) -> tuple[list[Any], list[Any]]:
                copies = copy([tensor for tower in rows for tensor in tower])
                return copies[: len(operations)], copies[len(operations) :]

            self._fetch = loop_over_steps(self._placeholders, picks, copied)

    def request(
        self, plan: LoadPlan, buffer: int, order: EpochOrder
    ) -> tuple[tf.Tensor, dict[Any, Any]]:
        """Returns the fetch, [E * S, M] scalars, and the feeds of whole epochs."""
        arrays = loop_feeds(plan, order, buffer)
        own = dict(zip(self._placeholders, arrays, strict=True))
        return self._fetch, {**self._step.own_feeds(), **own}


def build_epochs(step: SessionStep, picks: list[Pick]) -> SessionEpochs | None:
    """Builds the loop; returns None if a tower has no loss to report."""
    losses = [loss_of(loss) for loss in step.losses]
    known = [loss for loss in losses if loss is not None]
    return SessionEpochs(step, known, picks) if len(known) == len(losses) else None


def _make_copier(
    inputs: Sequence[tf.Tensor], targets: Sequence[tf.Tensor | tf.Operation]
) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor | tf.Operation]]:
    """Returns what copies the ops from ``inputs`` to ``targets`` into a body."""
    ends = [t if isinstance(t, tf.Operation) else t.op for t in targets]
    operations = _ancestors({t.op for t in inputs}, ends)
    outside = {op for op in operations if _stays_outside(op)}
    part = _graph_def(inputs[0].graph, {op.name for op in operations - outside})
    outer = sorted((t for op in outside for t in op.outputs), key=lambda t: str(t.name))
    read = {name.removesuffix(":0") for node in part.node for name in node.input}

    def copy(replacements: Sequence[tf.Tensor]) -> list[tf.Tensor | tf.Operation]:
        body = tf.compat.v1.get_default_graph()  # of a function: it captures
        inside: dict[str, tf.Tensor] = {t.name: body.capture(t) for t in outer}
        pairs = zip(inputs, replacements, strict=True)
        inside.update({tensor.name: new for tensor, new in pairs})
        copied = tf.graph_util.import_graph_def(
            part,
            # Importing rejects replacements for tensors that no node reads.
            input_map={n: t for n, t in inside.items() if n.removesuffix(":0") in read},
            return_elements=[t.name for t in targets if t.name not in inside],
            name="step",
        )
        fresh = iter(copied)
        return [inside[t.name] if t.name in inside else next(fresh) for t in targets]

    return copy


def _leaves(fetches: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what nested dictionaries of fetches hold; joins names with ``/``."""
    for name, value in fetches.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


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
    """Removes control inputs and colocations that refer to nodes outside the part."""
    kept = [i for i in node.input if not i.startswith("^") or i[1:] in names]
    del node.input[:]
    node.input.extend(kept)
    if "_class" in node.attr:
        near = [c for c in node.attr["_class"].list.s if c.decode()[5:] in names]
        del node.attr["_class"].list.s[:]
        node.attr["_class"].list.s.extend(near)
        if not near:
            del node.attr["_class"]

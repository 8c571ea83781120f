"""Session runs: loads and steps through callables, and whole epochs in one call.

``Session.run`` processes its fetches and feeds on every call, which for small
models takes longer than the step; a callable does so once. An epoch's call runs the
step, copied into a loop.

The step was built once, outside, as ``optimize`` runs it. The loop's body holds
a copy of the operations between its inputs and its update; placeholders and resource
handles (variables, tables, ...) stay the outer ones and are captured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core import Tower, map_towers
from tw_core.devices import check_devices
from tw_rlload._loading.plan import LoadPlan
from tw_rlload._loading.specs import Array, DataVariables, is_numeric
from tw_rlload._loading.staging import Writer, no_rows
from tw_rlload._session.step import SessionStep, loss_of
from tw_rlload._tf_compat import make_callable
from tw_rlload._training.loop import (
    LOOP_SPECS,
    LoopFeeds,
    Pick,
    lay_out,
    loop_feeds,
    loop_over_steps,
)
from tw_rlload._training.order import EpochOrder


class SessionCalls:
    """Runs fetches; caches the callables of the session used last."""

    def __init__(self, graph: tf.Graph) -> None:
        """Starts without a session; ``graph`` contains everything to run."""
        self._graph = graph
        self._cache: tuple[Any, dict[Any, Any]] = (None, {})

    def check_session(self, sess: Any) -> None:
        """Refuses anything but a session of the graph."""
        if not callable(getattr(sess, "run", None)):
            raise TypeError(
                f"sess must be a session such as tf.compat.v1.Session; got "
                f"{sess!r:.80} ({type(sess).__name__})."
            )
        graph = getattr(sess, "graph", None)
        if graph is not None and graph is not self._graph:
            raise ValueError(
                "sess must be a session of the graph in which the optimizer was made; "
                "make it with Session(graph=...), or inside `with graph.as_default():`."
            )

    def run(
        self, sess: Any, key: Any, fetches: Any, feeds: Mapping[tf.Tensor, Any]
    ) -> Any:
        """Runs as ``sess.run`` does; equal keys must mean equal fetches."""
        self.check_session(sess)
        plain = isinstance(sess, tf.compat.v1.Session)
        if not plain or not all(isinstance(tensor, tf.Tensor) for tensor in feeds):
            return sess.run(fetches, feeds)
        session, callables = self._cache
        if session is not sess:
            callables = {}
            # In one assignment, since a loading thread calls this too.
            self._cache = (sess, callables)
        names = tuple(tensor.name for tensor in feeds)
        if (key, names) not in callables:
            callables[key, names] = _make(sess, fetches, list(feeds))
        call = callables[key, names]
        if call is None:
            return sess.run(fetches, feeds)
        return call(*(_as_fed(tensor, value) for tensor, value in feeds.items()))


def session_writer(
    towers: Sequence[Tower], variables: DataVariables, calls: SessionCalls
) -> Callable[..., Writer]:
    """Builds ops that free and fill variables; returns a function of a session."""

    def assign_each(_: Tower, column: list[tf.Variable]) -> list[Any]:
        pairs = zip(column, fed, strict=True)
        return [variable.assign(rows, read_value=False) for variable, rows in pairs]

    def empty_each(_: Tower, column: list[tf.Variable]) -> tf.Operation:
        return tf.group(*(v.assign(no_rows(v), read_value=False) for v in column))

    with tf.device("/cpu:0"), tf.name_scope("load"):
        fed = [tf.compat.v1.placeholder(v.dtype, v.shape) for v in variables[0][0]]
    assigns, empties = [], []
    for buffer in variables:
        assigns.append(map_towers(assign_each, towers, buffer))
        empties.append(tf.group(*map_towers(empty_each, towers, buffer)))
    checked: Any = None

    def bind(sess: Any) -> Writer:
        nonlocal checked
        calls.check_session(sess)
        if isinstance(sess, tf.compat.v1.Session) and sess is not checked:
            check_devices([tower.device for tower in towers], session=sess)
            checked = sess

        def empty(buffer: int) -> None:
            calls.run(sess, ("empty", buffer), empties[buffer], {})

        def write(buffer: int, tower: int, column: int, rows: Array) -> None:
            key, assign = ("write", buffer, tower, column), assigns[buffer][tower]
            calls.run(sess, key, assign[column], {fed[column]: rows})

        return Writer(empty, write)

    return bind


def _make(
    sess: tf.compat.v1.Session, fetches: Any, feeds: list[tf.Tensor]
) -> Callable[..., Any] | None:
    """Makes the callable; returns None for fetches that only ``run`` supports."""
    leaves = tf.nest.flatten(fetches)
    if not all(isinstance(leaf, tf.Tensor | tf.Operation) for leaf in leaves):
        return None
    fed = [tensor.name for tensor in feeds]  # A fed tensor cannot also be fetched.
    tensors = {t.name: t for t in leaves if isinstance(t, tf.Tensor)}
    computed = [tensor for name, tensor in tensors.items() if name not in fed]
    operations = [leaf for leaf in leaves if isinstance(leaf, tf.Operation)]
    run = make_callable(sess, computed, operations, feeds)

    def call(*values: Any) -> Any:
        got = dict(zip(fed, values, strict=True))
        got |= {t.name: v for t, v in zip(computed, run(*values), strict=True)}
        flat = [got.get(leaf.name) for leaf in leaves]  # an operation gives None
        return tf.nest.pack_sequence_as(fetches, flat)

    return call


def _as_fed(tensor: tf.Tensor, value: Any) -> Any:
    array = np.asarray(value, tensor.dtype.as_numpy_dtype)
    if not tensor.shape.is_compatible_with(array.shape):
        raise ValueError(
            f"{tensor.name} takes values of shape {tensor.shape}; got shape "
            f"{array.shape} from extra_compute_grad_feed_dict()."
        )
    return array


class SessionEpochs:
    """A loop over steps in a session graph."""

    def __init__(
        self, step: SessionStep, losses: list[tf.Tensor], picks: list[Pick]
    ) -> None:
        """Copies the step into a loop."""
        leaves = [list(_leaves(fetches)) for fetches in step.fetches]
        others = [
            {name: value for name, value in own if _is_scalar(value)} for own in leaves
        ]
        self.layout, scalars = lay_out(losses, step.weights, others)
        fetched = [value for own in leaves for _, value in own]
        operations = [op for op in fetched if isinstance(op, tf.Operation)]
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
    """Returns a function that copies ops from ``inputs`` to ``targets`` into a body."""
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
    """Yields the leaves of nested dictionaries, with names joined by ``/``."""
    for name, value in fetches.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _is_scalar(value: Any) -> bool:
    return tf.is_tensor(value) and value.shape.rank == 0 and is_numeric(value.dtype)


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

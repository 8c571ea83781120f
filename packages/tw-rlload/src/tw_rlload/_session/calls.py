"""Session runs, through callables that are made once, and loads.

``Session.run`` processes its fetches and feeds on every call, which for small
models takes longer than the step; a callable does so once. Sessions with hooks
run everything themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core import Tower, map_towers
from tw_core.checks import caller
from tw_core.devices import check_devices
from tw_rlload._loading.specs import Array, DataVariables
from tw_rlload._loading.staging import Writer, no_rows
from tw_rlload._tf_compat import make_callable


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
                f"{caller()}: sess must be a session, as tf.compat.v1.Session is; got "
                f"{sess!r:.80} ({type(sess).__name__})."
            )
        graph = getattr(sess, "graph", None)
        if graph is not None and graph is not self._graph:
            raise ValueError(
                f"{caller()}: sess is a session of another graph than the optimizer "
                "was made in; make it with Session(graph=...), or inside `with "
                "graph.as_default():`."
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
            # In one assignment, as a loading thread calls too.
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
    """Builds the ops that free and fill variables; returns what binds a session."""

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
    fed = [tensor.name for tensor in feeds]  # a fed tensor cannot also be fetched
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
            f"{caller()}: {tensor.name} takes values of shape {tensor.shape}; got one "
            f"of shape {array.shape} from extra_compute_grad_feed_dict()."
        )
    return array

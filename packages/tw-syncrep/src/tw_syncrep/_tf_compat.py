"""What TensorFlow has no public function for; nothing else imports it."""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

try:
    from tensorflow.python.client.session import _FetchHandler
except ImportError:  # TensorFlow may move it with any version.
    _FetchHandler = None

_E = TypeVar("_E", bound=Exception)
_LEADER = "/job:worker/replica:0/task:0"
_NEEDED = ("_closed", "_extend_graph", "_call_tf_sessionrun", "_do_call")


def can_prepare(session: tf.compat.v1.Session) -> bool:
    """Returns whether this TensorFlow has what prepared calls need."""
    return _FetchHandler is not None and all(hasattr(session, n) for n in _NEEDED)


class PreparedCall:
    """Fetches and feeds that ``Session.run`` need not look at again.

    The public ``Session.make_callable`` prepares fetches without feeds only; with
    feeds it calls ``Session.run``.
    """

    def __init__(
        self, graph: tf.Graph, fetches: Any, feeds: Sequence[tf.Tensor]
    ) -> None:
        """Looks at them.

        Args:
          graph: that has them.
          fetches: any structure of fetches, none of them fed.
          feeds: [N] what is fed.
        """
        self._handler = _FetchHandler(graph, fetches, {})
        self._outputs = [tensor._as_tf_output() for tensor in self._handler.fetches()]
        self._targets = [operation._c_op for operation in self._handler.targets()]
        self._feeds = [tensor._as_tf_output() for tensor in feeds]

    def run(self, session: tf.compat.v1.Session, values: Sequence[np.ndarray]) -> Any:
        """Runs them.

        Args:
          session: of the graph.
          values: [N] of the feeds' dtypes and shapes.

        Returns:
          What ``Session.run`` does.

        Raises:
          RuntimeError: the session is closed.
          tf.errors.OpError: as ``Session.run``.
        """
        if session._closed:
            raise RuntimeError("Attempted to use a closed Session.")
        session._extend_graph()
        fed = dict(zip(self._feeds, values, strict=True))
        call = session._call_tf_sessionrun
        results = session._do_call(call, None, fed, self._outputs, self._targets, None)
        return self._handler.build_results(session, results)


def has_started() -> bool:
    """Returns whether this process's eager runtime has been initialized."""
    known = context.context_safe()
    return known is not None and bool(known._initialized)


def join_cluster(addresses: Sequence[str], rank: int, *, sleep_at_once: bool) -> None:
    """Has the eager runtime start as a task of a cluster, for collectives.

    Until it starts, with its first op or ``start_runtime``, it takes settings.

    Args:
      addresses: "host:port" of every rank's server.
      rank: of this process, whose server starts with the runtime.
      sleep_at_once: whether its idle threads sleep instead of looking for work.
    """
    runtime = context.context()
    runtime.configure_collective_ops(
        collective_leader=_LEADER, scoped_allocator_enabled_ops=()
    )
    definition = tensorflow_server_pb2.ServerDef(
        job_name="worker", task_index=rank, protocol="grpc"
    )
    job = definition.cluster.job.add(name="worker")
    for index, address in enumerate(addresses):
        job.tasks[index] = address
    runtime.enable_collective_ops(_Cluster(definition, sleep_at_once))
    # A child that is forked before the runtime starts would start this server, too.
    forget = functools.partial(setattr, runtime, "_collective_ops_server_def", None)
    os.register_at_fork(after_in_child=forget)


class _Cluster:
    """A server's definition, completed when TensorFlow reads it as the runtime starts.

    The server makes the devices and threads anew. Without the runtime's settings there
    would be one CPU device, and each process would take every GPU.
    """

    def __init__(self, definition: Any, sleep_at_once: bool) -> None:
        self._definition, self._sleep_at_once = definition, sleep_at_once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._definition, name)

    def SerializeToString(self) -> bytes:
        settings = context.context().config
        settings.experimental.disable_thread_spinning = self._sleep_at_once
        self._definition.default_session_config.CopyFrom(settings)
        return bytes(self._definition.SerializeToString())


def start_runtime() -> None:
    """Starts the eager runtime; harmless where it runs.

    Raises:
      tf.errors.OpError: its server cannot start.
    """
    context.context().ensure_initialized()


def abort_collectives(message: str) -> None:
    """Ends all collectives of this process, running and later ones, with an error."""
    if has_started():  # Otherwise the agreement before the first one raises.
        context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def explain_unavailable(explain: Callable[[str], str]) -> None:
    """Has each ``tf.errors.UnavailableError`` say what a function makes of its message.

    From now on, in all of this process. TensorFlow makes its errors in C++, out of the
    classes that it was given when it was imported, so none can take their place.

    Args:
      explain: takes a message, and returns one.
    """
    begin = tf.errors.UnavailableError.__init__

    @functools.wraps(begin)
    def begin_explained(
        self: Any, node_def: Any, op: Any, message: str, *args: Any
    ) -> None:
        begin(self, node_def, op, explain(message), *args)

    tf.errors.UnavailableError.__init__ = begin_explained


def kept_by_autograph(error: _E) -> _E:
    """Has AutoGraph let an error through; it makes a ``StagingError`` of others."""
    error.ag_pass_through = True  # type: ignore[attr-defined]
    return error


def eager_mode() -> AbstractContextManager[None]:
    """Returns a scope in which this thread runs eagerly, whatever the default is."""
    scope: AbstractContextManager[None] = context.eager_mode()
    return scope


def run_independently(graph: tf.Graph, operations: Sequence[tf.Operation]) -> None:
    """Takes ops out of the order in which a function that is traced runs its ops."""
    dependencies: Any = getattr(graph, "experimental_acd_manager", None)
    if dependencies is not None:
        for operation in operations:
            dependencies.run_independently(operation)

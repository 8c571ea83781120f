"""A session whose creation, calls and end are bounded.

A hook cannot do this: it is not asked while a session is made, and cannot
interrupt a call. The session lives in a thread of its own, and the caller looks
at the parameter servers while it waits.
"""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import tensorflow as tf

from tw_core.checks import check_function
from tw_syncrep._call_checks import check_kind, check_timeouts
from tw_syncrep._session.call_thread import CallThread
from tw_syncrep._timeouts.server_monitor import ServerWatch

T = TypeVar("T")


class TrainingSession:
    """What ``training_session`` returns; used as a ``MonitoredSession`` is."""

    def __init__(
        self,
        create: Callable[[], Any],
        *,
        servers: Mapping[str, str],
        wait_timeout_s: float | None,
        start_timeout_s: float | None,
        unanswered: Callable[[], bool],
    ) -> None:
        """Creates the session in a thread of its own.

        Args:
          create: returns a ``MonitoredSession``.
          servers: "host:port" of parameter servers by task name.
          wait_timeout_s: how long they may be silent; None for any time.
          start_timeout_s: how long ``create`` may take; None for any time.
          unanswered: tells whether a question through the session got no answer.

        Raises:
          TypeError: an argument is of another type.
          ValueError: a timeout is not above 0.
          SyncTimeoutError: it could not be created in time.
        """
        check_function("TrainingSession", create=create)
        check_function("TrainingSession", unanswered=unanswered)
        check_kind("TrainingSession", Mapping, "addresses by task", servers=servers)
        check_timeouts(
            "TrainingSession",
            wait_timeout_s=wait_timeout_s,
            start_timeout_s=start_timeout_s,
        )
        self._servers = servers
        self._wait_timeout_s = wait_timeout_s
        self._unanswered = unanswered
        self._graph = tf.compat.v1.get_default_graph()
        self._thread = CallThread(self._graph.as_default())
        self._session = self._create(create, start_timeout_s)

    @property
    def graph(self) -> tf.Graph:
        """The graph that was launched."""
        return self._graph

    def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: Any = None,
        run_metadata: Any = None,
    ) -> Any:
        """Runs ops and tensors, as ``tf.compat.v1.Session.run``.

        Raises:
          TypeError: there is nothing to fetch.
          SyncTimeoutError: a wait took too long.
        """
        if fetches is None:
            raise TypeError(
                "TrainingSession.run: fetches must be ops and tensors; got None."
            )
        return self._call(
            "a step",
            lambda: self._session.run(fetches, feed_dict, options, run_metadata),
        )

    def run_step_fn(self, step_fn: Callable[[Any], Any]) -> Any:
        """Runs a function of a step context, as ``MonitoredSession.run_step_fn``.

        Raises:
          TypeError: ``step_fn`` is no function.
          SyncTimeoutError: a wait took too long.
        """
        check_function("TrainingSession.run_step_fn", step_fn=step_fn)
        return self._call("a step", lambda: self._session.run_step_fn(step_fn))

    def should_stop(self) -> bool:
        """Whether the training is over."""
        return bool(self._session.should_stop())

    def close(self) -> None:
        """Ends in order.

        Raises:
          SyncTimeoutError: parameter servers did not answer in time.
        """
        self._end(self._session.close)

    def __enter__(self) -> "TrainingSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Ends in order; the end of the data is no error."""
        ended = self._end(lambda: self._session.__exit__(kind, error, traceback))
        return bool(ended)

    def _create(self, create: Callable[[], Any], limit_s: float | None) -> Any:
        watch = self._watch("creating the session", limit_s=limit_s)
        try:
            return self._thread.run(create, watch.look)
        except BaseException:
            self._thread.end()
            raise

    def _end(self, close: Callable[[], T]) -> T | None:
        if self._thread.is_abandoned:  # The error that did it is on its way.
            return None
        if self._thread.has_ended:
            return None
        try:
            return self._call("closing the session", close)
        finally:
            self._thread.end()

    def _call(self, doing: str, call: Callable[[], T]) -> T:
        return self._thread.run(call, self._watch(doing).look)

    def _watch(self, doing: str, *, limit_s: float | None = None) -> ServerWatch:
        return ServerWatch(
            doing,
            self._servers,
            self._wait_timeout_s,
            limit_s=limit_s,
            unanswered=self._unanswered,
        )

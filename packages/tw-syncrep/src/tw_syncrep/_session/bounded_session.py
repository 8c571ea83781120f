"""A session whose creation, calls and end are bounded.

A hook cannot do this: it is not called while a session is created, and Python cannot
interrupt a call that is blocked inside TensorFlow. So the session lives in its own
thread. The caller waits for its answers, checks the parameter servers now and then, and
abandons the thread when waiting has become pointless.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import tensorflow as tf

from tw_core.internal import CallThread, Recorder, check_function, check_kind
from tw_syncrep._checks import check_timeouts
from tw_syncrep._errors import ServerLostError, SyncTimeoutError
from tw_syncrep._timeouts.server_monitor import CHECK_EVERY_S, ServerMonitor

T = TypeVar("T")


_LOST = (
    SyncTimeoutError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.NotFoundError,
    tf.errors.UnavailableError,
)
"""Errors that a call may raise when another process has ended its session."""


class AbandonedError(RuntimeError):
    """An earlier call was abandoned and may still be running."""


class SessionCalls(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Ends abandoned calls, and records since when a session has been recreated.

    An abandoned call may return much later, when its server answers again. It would
    then call hooks that serve another session by now, and if it failed, TensorFlow
    would recreate its session: the replica would have two. So this hook is the first.

    TensorFlow recreates a session inside a call whenever it fails. A session that soon
    fails again does not count as made: the time counts from the first loss. A session
    that the replica replaced itself was not lost; its hook bounds how often.
    """

    is_left = False
    """Whether the session's call was abandoned."""

    def __init__(
        self, settled_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes the time that a session must run, in seconds, to count as made."""
        self._settled_s = settled_s
        self._clock = clock
        self._lost_at: float | None = None
        self._runs_since: float | None = None
        self._replaced = 0

    @property
    def remade_since(self) -> float | None:
        """When recreating the session began; None while a session runs."""
        return self._lost_at if self._runs_since is None else None

    def check(self, *_: object) -> None:
        """Ends an abandoned call, by raising in it."""
        if self.is_left:
            raise AbandonedError(
                "training_session: this call was abandoned; its result is not needed."
            )

    def begin_making(self, replaced: int = 0) -> None:
        """Records that a session is being made; raises like ``check``.

        ``replaced`` is how many sessions the replica has replaced in a row.
        """
        self.check()
        ran_since, now = self._runs_since, self._clock()
        has_settled = self._settled_s is None or (
            ran_since is not None and now - ran_since >= self._settled_s
        )
        if self._lost_at is None or has_settled or replaced > self._replaced:
            self._lost_at = now
        self._runs_since, self._replaced = None, replaced

    def before_run(self, run_context: Any) -> None:
        """Records that a session runs; raises like ``check``."""
        del run_context
        self.check()
        self._runs_since = self._clock()

    after_create_session = end = check

    def after_run(self, *_: object) -> None:
        """Records that a call has succeeded; raises like ``check``."""
        self.check()
        self._lost_at = None


class TrainingSession:
    """The session of ``training_session``; used like a ``MonitoredSession``."""

    _watch: Mapping[str, Any] = MappingProxyType({})  # further fields of the monitors

    def _find_replaced(self) -> Exception | None:
        """Returns the error if another process has replaced this one."""
        return None

    def __init__(
        self,
        create: Callable[[], Any],
        *,
        servers: Mapping[str, str],
        wait_timeout_s: float | None,
        start_timeout_s: float | None,
        unanswered: Callable[[], bool],
        failure: Callable[[], Exception | None] = lambda: None,
        release: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Creates the session in its own thread.

        Args:
          create: returns a ``MonitoredSession``.
          servers: "host:port" of parameter servers by task name.
          wait_timeout_s: longest silence of servers, in seconds; None for no bound.
          start_timeout_s: longest run of ``create``, in seconds; None for no bound.
          unanswered: returns whether a request in the session got no answer.
          failure: returns the reason to abandon a call, or None.
          release: called at the end, and when a call is abandoned, with whether one
            was; ends the threads that watch over the session.

        Raises:
          TypeError: an argument is of the wrong type.
          ValueError: a timeout is not above 0.
          SyncTimeoutError: it could not be created in time.
        """
        check_function(create=create)
        check_function(unanswered=unanswered)
        check_function(failure=failure)
        check_function(release=release)
        check_kind(Mapping, "addresses by task", servers=servers)
        check_timeouts(wait_timeout_s=wait_timeout_s, start_timeout_s=start_timeout_s)
        self._release = release
        named = ", ".join(f"{name} at {at}" for name, at in servers.items())
        self._events = Recorder("training_session", facts={"servers": named or "none"})
        self._monitor: Callable[..., ServerMonitor] = partial(
            ServerMonitor,
            servers=servers,
            timeout_s=wait_timeout_s,
            unanswered=unanswered,
            failure=failure,
            events=self._events,
            **self._watch,
        )
        self._graph = tf.compat.v1.get_default_graph()
        self._thread = CallThread(
            "tw-syncrep-session", surroundings=self._graph.as_default()
        )
        try:
            self._session = self._call(
                "creating the session", create, limit_s=start_timeout_s
            )
        except BaseException:
            self._thread.end()
            self._release(self._thread.is_abandoned)
            raise

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
                "TrainingSession.run: fetches must be ops or tensors; got None."
            )
        return self._call(
            "a step",
            lambda: self._session.run(fetches, feed_dict, options, run_metadata),
        )

    def run_step_fn(self, step_fn: Callable[[Any], Any]) -> Any:
        """Runs a function of a step context, as ``MonitoredSession.run_step_fn``.

        Raises:
          TypeError: ``step_fn`` is not a function.
          SyncTimeoutError: a wait took too long.
        """
        check_function(step_fn=step_fn)
        return self._call("a step", lambda: self._session.run_step_fn(step_fn))

    def should_stop(self) -> bool:
        """Whether the training is over."""
        return bool(self._session.should_stop())

    def close(self) -> None:
        """Closes the session.

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
        """Closes the session; the end of the data is not an error."""
        ended = self._end(lambda: self._session.__exit__(kind, error, traceback))
        return bool(ended)

    def _end(self, close: Callable[[], T]) -> T | None:
        # If a call was abandoned, the error that caused this is on its way.
        if self._thread.is_abandoned or self._thread.has_ended:
            return None
        try:
            return self._call("closing the session", close)
        finally:
            self._thread.end()
            self._release(self._thread.is_abandoned)

    def _call(
        self, doing: str, call: Callable[[], T], *, limit_s: float | None = None
    ) -> T:
        monitor = self._monitor(doing, limit_s=limit_s)
        if self._thread.is_abandoned:
            raise AbandonedError(
                "training_session: an earlier call did not return and was abandoned; "
                "make a new session."
            )
        if self._thread.has_ended:
            raise RuntimeError(
                "training_session: the session was closed; make a new one."
            )
        try:
            with self._events.during("training_session", doing):
                return self._thread.run(call, monitor.check, after_s=CHECK_EVERY_S)
        except BaseException as error:
            if self._thread.is_abandoned:
                self._release(True)
            if isinstance(error, _LOST) and not isinstance(error, ServerLostError):
                if (replaced := self._find_replaced()) is not None:
                    raise replaced from error
                if isinstance(error, SyncTimeoutError):
                    raise monitor.explain(error) from error.__cause__
            raise

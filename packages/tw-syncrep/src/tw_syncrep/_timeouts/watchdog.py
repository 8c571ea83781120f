"""A replica's watchdog: a thread that bounds the waits of its training op.

A call that waits inside TensorFlow cannot be interrupted from Python. The watchdog
wakes it with a token, as the chief does at the end of a round. If the round is long
over and no token helps, it has the session replaced; if the wait's deadline is long
over, the call is abandoned. In an ordinary run it only sends heartbeats.

Its own requests to the server may never return: TensorFlow does not bound the first
call of a set of fetches, which registers the graph. So every request is made once while
the session is made, and a request counts as unanswered while it is pending.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import tensorflow as tf

from tw_core.internal import Recorder
from tw_syncrep._errors import SyncTimeoutError
from tw_syncrep._protocol.graph import LifecycleOps
from tw_syncrep._timeouts.reports import report_run
from tw_syncrep._timeouts.status import (
    Status,
    format_status,
    longest_pause_s,
    overdue_s,
    read_status,
)
from tw_syncrep._timeouts.steady_times import SteadyTimes

_log = logging.getLogger("tw_syncrep")

_LONGEST_HEARTBEAT_S = 10.0
_ASK_TIMEOUT_S = 0.5
_WAKE_TIMEOUT_S = 5.0
_NO_WAIT = (-1, -1)
_LATE_S = 1.0

Ask = Callable[..., Sequence[Any] | None]
"""Takes fetches and their feeds; returns None if no answer arrives in time."""


@dataclass(eq=False)
class Watchdog:
    """Bounds the waits of one session's training op."""

    session: tf.compat.v1.Session
    ops: LifecycleOps
    judge: Callable[[Status], SyncTimeoutError | None]
    judge_absence: Callable[[Status], SyncTimeoutError | None]
    _: KW_ONLY
    replica: int
    timeout_s: float
    replace_session: Callable[[str], None]
    recover: Callable[[Ask, SyncTimeoutError, Status], bool] | None
    events: Recorder
    times: SteadyTimes
    clock: Callable[[], float] = time.monotonic
    error: Exception | None = field(init=False, default=None)
    """The error for which the training op was woken."""
    given_up: Exception | None = field(init=False, default=None)
    """The reason to abandon the training op, which waking has not ended."""

    def __post_init__(self) -> None:
        """Makes every request once, in the caller's thread, and starts its own."""
        self._name = f"replica {self.replica}"
        self._calls = 0
        self._heartbeat_s = heartbeat_interval(self.timeout_s)
        self._check_at: float | None = None
        self._began_at = 0.0
        self._still_s = 0.0  # part of the wait in which the whole process stood still
        self._asked_at: float | None = None  # when a pending request was sent
        self._answered_at = 0.0
        self._raised_at = 0.0  # when ``error`` was set
        self._has_logged = False
        self._stopped = threading.Event()
        session, ops = self.session, self.ops
        session.run(ops.heartbeat)
        _, *parts = session.run([ops.position, *ops.status])
        self.times.restate(parts)
        session.run([ops.wake], {ops.position: _NO_WAIT})
        if self.recover is not None:
            session.run([ops.evict, ops.take_over], {ops.position: _NO_WAIT})
        self._thread = threading.Thread(
            target=self._run, name="tw-syncrep-watchdog", daemon=True
        )
        self._thread.start()

    @property
    def is_unanswered(self) -> bool:
        """Whether the server has been silent for too long.

        A pending request counts as unanswered. A wait reaches its deadline no later
        than the silence, which begins with the last answer.
        """
        asked_at = self._asked_at
        if asked_at is None or self._stopped.is_set():
            return False
        is_waiting = self._check_at is not None
        since = max(self._began_at, self._answered_at) if is_waiting else asked_at
        now = self.clock()
        return now - asked_at >= _ASK_TIMEOUT_S and now - since >= self.timeout_s

    def begin_wait(self) -> None:
        """Records that the training op starts."""
        self._calls += 1
        self.events.began(self._name, "training op, call", self._calls)
        self.error = None
        self._has_logged = False
        self._still_s = 0.0
        self._began_at = self.clock()
        self._check_at = self._began_at + min(self.timeout_s / 4, self._heartbeat_s)

    def end_wait(self) -> None:
        """Records that it has returned."""
        self.events.ended(self._name, "training op, call", self._calls)
        self._check_at = None
        self.error = None
        self._asked_at = None

    def stop(self) -> None:
        """Ends the thread after its current call."""
        self._stopped.set()

    def _run(self) -> None:
        next_beat = self.clock() + self._heartbeat_s
        # A wait that begins during a sleep ends after it: no sleep need be cut short.
        while True:
            began, check_at = self.clock(), self._check_at
            due = next_beat if check_at is None else min(next_beat, check_at)
            pause = max(0.0, due - began)
            if self._stopped.wait(pause):
                return
            now = self.clock()
            if now - began - pause > _LATE_S:  # The process, and its step, stood still.
                self._still_s += now - began - pause
            if now >= next_beat:
                self._ask(self.ops.heartbeat)
                next_beat = now + self._heartbeat_s
            check_at = self._check_at
            if check_at is not None and now >= check_at:
                self._check()

    def _check(self) -> None:
        answer = self._ask([self.ops.position, *self.ops.status])
        running_s = self.clock() - self._began_at
        if answer is None:  # The session's own bounds cover a lost server.
            self._check_again(in_s=_ASK_TIMEOUT_S)
            return
        position, parts = answer[0], self.times.restate(answer[1:])
        overdue = overdue_s(parts, position, self.replica, running_s=running_s)
        status = read_status(parts)
        self.events.noted("saw", self._name, "round", status.round_number)
        if overdue > 0 and self._check_at is not None:
            self._end_overdue(position, overdue)
            return
        error = self.judge(status)
        if error is None:
            self._look_at_silence(status, running_s)
            self._check_again(in_s=self._rest_of_wait(status))
        elif self.recover is not None and self.recover(self._ask, error, status):
            told = f"the run despite {type(error).__name__} in round"
            self.events.noted("continued", self._name, told, status.round_number)
            # The replicas need time to go on.
            self._check_again(in_s=min(self.timeout_s / 4, 1.0))
        else:
            self._end_wait_by(error, status)

    def _end_wait_by(self, error: SyncTimeoutError, status: Status) -> None:
        """Makes the hook raise an error; abandons a training op that does not end."""
        if self.error is None:
            self.error, self._raised_at = self._with_report(error, status), self.clock()
        elif self.clock() - self._raised_at >= _WAKE_TIMEOUT_S:
            self.given_up = self.error
        self._check_again(in_s=_WAKE_TIMEOUT_S)
        if not self._wake((status.round_number, status.incarnation)):
            self._check_again(in_s=_ASK_TIMEOUT_S)

    def _with_report(self, error: SyncTimeoutError, status: Status) -> SyncTimeoutError:
        return report_run(
            *(error, status, self.events),
            replica=self.replica,
            deadline_s=self.timeout_s,
        )

    def _wake(self, position: Sequence[int]) -> bool:
        """Ends the wait at ``position``; returns whether the server has answered."""
        feed = {self.ops.position: tuple(position)}
        # In a list: the answer to a bare op is None.
        return self._ask([self.ops.wake], feed, timeout_s=_WAKE_TIMEOUT_S) is not None

    def _end_overdue(self, position: Sequence[int], overdue: float) -> None:
        """Wakes a training op whose round is over, or has its session replaced."""
        half_s = self.timeout_s / 2  # before the others give up on it
        if overdue < half_s:
            if overdue >= half_s / 4:
                self._wake(position)
            self._check_again(in_s=min(half_s / 4, half_s - overdue))
            return
        self.stop()
        self.replace_session(
            f"SyncReplicasOptimizer: replica {self.replica} did not learn of the end "
            f"of round {position[0]}, {overdue:.1f} s ago; replacing its session."
        )

    def _look_at_silence(self, status: Status, running_s: float) -> None:
        """Logs, and finally abandons, a step that neither returns nor sends."""
        arrived_s = status.arrived_s[self.replica]
        has_arrived = arrived_s is not None and arrived_s <= running_s
        active_s = running_s - self._still_s
        if has_arrived or active_s < self.timeout_s / 4:
            return
        if active_s >= self.timeout_s:
            given_up = self.judge_absence(status)
            if given_up is not None and self.given_up is None:
                self.given_up = self._with_report(given_up, status)
        if active_s >= 2 * self.timeout_s and self.replica in status.evicted:
            self.stop()
            self.replace_session(
                f"SyncReplicasOptimizer: the run goes on without replica "
                f"{self.replica}, whose training op has run for {running_s:.1f} s; "
                "replacing its session."
            )
            return
        if self._has_logged:
            return
        self._has_logged = True
        _log.warning(
            "SyncReplicasOptimizer: the training op of replica %d has run for %.1f s, "
            "and its gradient has not arrived: the op is computing or waiting for its "
            "input, or the gradient was lost. The server's status: %s.",
            self.replica,
            running_s,
            format_status(status),
        )

    def _rest_of_wait(self, status: Status) -> float:
        waited = [status.arrived_s[replica] or 0.0 for replica in status.arrived]
        rest_s = max(0.02, self.timeout_s - max(waited, default=0.0))
        return min(rest_s, longest_pause_s(len(status.heard_s)))

    def _check_again(self, *, in_s: float) -> None:
        if self._check_at is not None:
            self._check_at = self.clock() + in_s

    def _ask(
        self, fetches: Any, feed: Any = None, *, timeout_s: float = _ASK_TIMEOUT_S
    ) -> Sequence[Any] | None:
        """Runs a small fetch; returns None if the server does not answer in time."""
        options = tf.compat.v1.RunOptions(timeout_in_ms=int(timeout_s * 1000))
        # A heartbeat returns no data, so it succeeds even if the servers cannot reach
        # this task: then steps wait forever, and no other request is answered.
        answers_none = fetches is self.ops.heartbeat and self._asked_at is not None
        self._asked_at = self._asked_at or self.clock()
        self.events.began(self._name, "a request to the server")
        try:
            answer: Sequence[Any] = self.session.run(fetches, feed, options=options)
        except (tf.errors.CancelledError, RuntimeError):
            self.stop()  # The session was closed: there is nothing left to watch.
            return None
        except tf.errors.OpError:
            return None
        self.events.ended(self._name, "a request to the server")
        if answers_none and self._check_at is not None:
            return answer
        self._asked_at = None
        self._answered_at = self.clock()
        return answer


def heartbeat_interval(timeout_s: float) -> float:
    """Returns the seconds between two heartbeats of a replica."""
    return min(_LONGEST_HEARTBEAT_S, timeout_s / 4)

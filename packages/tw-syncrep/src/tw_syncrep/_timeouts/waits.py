"""What a replica waits for: others before its first step, then the ends of rounds."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_syncrep._protocol.graph import LifecycleOps, SyncGraph
from tw_syncrep._timeouts.errors import StartTimeoutError, SyncTimeoutError
from tw_syncrep._timeouts.status import (
    Status,
    name_replicas,
    overdue_s,
    read_status,
)

_POLL_S = 0.05
_LONGEST_HEARTBEAT_S = 10.0
_ASK_TIMEOUT_S = 0.5
_WAKE_TIMEOUT_S = 5.0  # Its first call has TensorFlow prune and place the graph.


class StartBarrier:
    """The start of one session of a replica: it needs the chief, and enough others.

    A replica that starts before the chief joins again once the chief has started:
    only then is there an incarnation to compute for.

    Attributes:
      is_passed: whether ``wait`` has returned.
    """

    def __init__(self, graph: SyncGraph, session: tf.compat.v1.Session) -> None:
        """Has not joined yet.

        Raises:
          RuntimeError: variables have no value; all are named.
        """
        names = [name.decode() for name in session.run(graph.uninitialized)]
        if names:
            raise RuntimeError(
                "SyncReplicasOptimizer: the model is not ready: these variables have "
                f"no value: {', '.join(names)}. Add them to the init_op, or make them "
                "before the session."
            )
        self.is_passed = False
        self._graph = graph
        self._session = session
        self._needed = min(graph.aggregate, graph.replicas)
        self._incarnation = 0

    def join(self, op: tf.Operation, feed: Any = None) -> None:
        """Joins the run with ``op``, the graph's op ``join`` or ``open``."""
        self._session.run(op, feed)
        self._incarnation = int(self._session.run(self._graph.position)[1])

    def wait(self, session: tf.compat.v1.Session, *, timeout_s: float | None) -> None:
        """Waits until the chief and enough replicas have started.

        Returns at once where the run that this replica has joined has ended: its
        step will stop it.

        Raises:
          StartTimeoutError: they have not, after the longest wait.
        """
        began = time.monotonic()
        while not self._has_started(status := self._read(session)):
            waited_s = time.monotonic() - began
            if timeout_s is not None and waited_s >= timeout_s:
                raise self._timeout(status, waited_s, timeout_s)
            if self._is_left_out(status):
                self.join(self._graph.ops.join)
            time.sleep(_POLL_S)
        self.is_passed = True

    def _has_started(self, status: Status) -> bool:
        if status.is_closed:  # If before this replica came, it is for the next run.
            return self._graph.replica in status.joined
        enough = len(status.joined) + len(status.left) >= self._needed
        return status.incarnation > 0 and enough and not self._is_left_out(status)

    def _is_left_out(self, status: Status) -> bool:
        """Returns whether the chief has started since this replica joined."""
        if not status.incarnation or status.is_closed:
            return False
        is_older = status.incarnation != self._incarnation
        return is_older or self._graph.replica not in status.joined

    def _timeout(
        self, status: Status, waited_s: float, timeout_s: float
    ) -> StartTimeoutError:
        own = self._graph.replica
        started = {own} if status.is_closed else {own, *status.joined}
        missing = sorted(set(range(self._graph.replicas)) - started)
        return StartTimeoutError(
            f"SyncReplicasOptimizer: replica {own} waited {waited_s:.1f} s for "
            f"the others to start (start_timeout_s is {timeout_s:g}); {self._needed} "
            f"replicas are needed.{_about_chief(status)} Started: "
            f"{name_replicas(status, sorted(started))}. Missing: "
            f"{name_replicas(status, missing)}. Start them, or raise start_timeout_s.",
            waited_s=waited_s,
            arrived=sorted(started),
            missing=missing,
            heard_s=status.heard_s,
        )

    def _read(self, session: tf.compat.v1.Session) -> Status:
        return read_status(session.run(self._graph.ops.status))


class Watchdog:
    """Bounds the waits of one session's training op, in a thread.

    A call that waits inside TensorFlow cannot be interrupted from Python. The watchdog
    wakes it with a token, as the chief does at the end of a round. Where the round is
    long over and the call does not return, no token helps: the watchdog has the session
    replaced. In an ordinary run it only records now and then that its replica lives.

    Attributes:
      error: why the training op was woken, until ``end_wait``.
      is_unanswered: whether the server was asked about a long wait and was silent.
    """

    def __init__(
        self,
        session: tf.compat.v1.Session,
        ops: LifecycleOps,
        judge: Callable[[Status], SyncTimeoutError | None],
        *,
        replica: int,
        timeout_s: float,
        replace_session: Callable[[str], None],
    ) -> None:
        """Starts the thread.

        Args:
          session: not wrapped.
          ops: of the optimizer.
          judge: takes the status and returns the error, if any.
          replica: whose session it is.
          timeout_s: longest wait.
          replace_session: takes the reason; called at half of ``timeout_s``, so that
            the others need not give this replica up.
        """
        self.error: Exception | None = None
        self.is_unanswered = False
        self._session = session
        self._ops = ops
        self._judge = judge
        self._replica = replica
        self._timeout_s = timeout_s
        self._replace_session = replace_session
        self._heartbeat_s = heartbeat_interval(timeout_s)
        self._check_at: float | None = None
        self._began_at = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="tw-syncrep-watchdog", daemon=True
        )
        self._thread.start()

    def begin_wait(self) -> None:
        """Records that the training op starts."""
        self.error = None
        self._began_at = time.monotonic()
        self._check_at = self._began_at + self._timeout_s / 2

    def end_wait(self) -> None:
        """Records that it has returned."""
        self._check_at = None
        self.error = None
        self.is_unanswered = False

    def stop(self) -> None:
        """Ends the thread after its present call."""
        self._stopped.set()

    def _run(self) -> None:
        next_beat = time.monotonic() + self._heartbeat_s
        # A wait that begins during a sleep ends after it: no one need wake us.
        while not self._stopped.wait(self._pause(next_beat)):
            now = time.monotonic()
            if now >= next_beat:
                self._ask(self._ops.heartbeat)
                next_beat = now + self._heartbeat_s
            check_at = self._check_at
            if check_at is not None and now >= check_at:
                self._check()

    def _pause(self, next_beat: float) -> float:
        check_at = self._check_at
        due = next_beat if check_at is None else min(next_beat, check_at)
        return max(0.0, due - time.monotonic())

    def _check(self) -> None:
        answer = self._ask([self._ops.position, *self._ops.status])
        running_s = time.monotonic() - self._began_at
        is_due = self._check_at is not None and running_s >= self._timeout_s
        self.is_unanswered = answer is None and is_due
        if answer is None:  # A lost server is for the session's bounds.
            self._check_again(in_s=_ASK_TIMEOUT_S)
            return
        position, *parts = answer
        overdue = overdue_s(parts, position, self._replica, running_s=running_s)
        if overdue >= self._timeout_s / 2 and self._check_at is not None:
            self._give_up(int(position[0]), overdue)
            return
        status = read_status(parts)
        error = self._judge(status)
        if error is not None:
            self._check_again(in_s=self._timeout_s)
            self._fail(error, status)
        else:
            self._check_again(in_s=self._rest_of_wait(status))

    def _fail(self, error: Exception, status: Status) -> None:
        """Wakes the training op, which then has ``error`` to raise."""
        self.error = error
        feed = {self._ops.position: (status.round_number, status.incarnation)}
        # In a list: of a bare op, the answer is None.
        if self._ask([self._ops.wake], feed, timeout_s=_WAKE_TIMEOUT_S) is None:
            self._check_again(in_s=_ASK_TIMEOUT_S)

    def _give_up(self, round_number: int, overdue: float) -> None:
        self.stop()
        self._replace_session(
            f"SyncReplicasOptimizer: replica {self._replica} did not learn of the end "
            f"of round {round_number}, {overdue:.1f} s ago; replacing its session."
        )

    def _rest_of_wait(self, status: Status) -> float:
        waited = [status.arrived_s[replica] or 0.0 for replica in status.arrived]
        return min(max(0.02, self._timeout_s - max(waited, default=0.0)), 1.0)

    def _check_again(self, *, in_s: float) -> None:
        if self._check_at is not None:
            self._check_at = time.monotonic() + in_s

    def _ask(
        self, fetches: Any, feed: Any = None, *, timeout_s: float = _ASK_TIMEOUT_S
    ) -> Sequence[Any] | None:
        """Runs something small; None where the server does not answer in time."""
        options = tf.compat.v1.RunOptions(timeout_in_ms=int(timeout_s * 1000))
        try:
            answer: Sequence[Any] = self._session.run(fetches, feed, options=options)
        except (tf.errors.OpError, RuntimeError):
            return None
        return answer


def heartbeat_interval(timeout_s: float) -> float:
    """Returns the seconds between two heartbeats of a replica."""
    return min(_LONGEST_HEARTBEAT_S, timeout_s / 4)


def _about_chief(status: Status) -> str:
    if status.is_closed:
        return " The chief has ended the run and has not begun another."
    return "" if status.incarnation else " The chief has not started."

"""A replica's watchdog: a thread that ends a wait for others after its timeout.

A call that waits inside TensorFlow cannot be interrupted from Python. The watchdog
wakes it with a token, as the chief does at the end of a round. Where the round is long
over and the call does not return, no token helps: the watchdog has the session
replaced. In an ordinary run it only records now and then that its replica lives.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tw_syncrep._protocol.graph import LifecycleOps
from tw_syncrep._protocol.run_table import RING, ReplicaField, RunField
from tw_syncrep._timeouts.errors import (
    ChiefLostError,
    ReplicaTimeoutError,
    SyncTimeoutError,
)
from tw_syncrep._timeouts.status import (
    MICROSECOND_S,
    Status,
    name_replicas,
    read_status,
)

_LONGEST_HEARTBEAT_S = 10.0
_ASK_TIMEOUT_S = 0.5
_WAKE_TIMEOUT_S = 5.0  # Its first call has TensorFlow prune and place the graph.


def heartbeat_interval(timeout_s: float) -> float:
    """Returns the seconds between two heartbeats of a replica."""
    return min(_LONGEST_HEARTBEAT_S, timeout_s / 4)


def judge_wait(
    status: Status, replica: int, *, timeout_s: float, needed: int
) -> SyncTimeoutError | None:
    """Decides whether a replica has waited too long, and for whom.

    Args:
      status: how the run stands.
      replica: whose wait it is.
      timeout_s: longest wait.
      needed: gradients that make a step.

    Returns:
      The error to raise; None where the replica still computes, or may wait.
    """
    waited = status.arrived_s[replica]
    if replica not in status.arrived or waited is None or waited < timeout_s:
        return None
    present = len(status.arrived) + len(status.missing)
    # With fewer replicas than gradients, all must have brought all of theirs.
    is_complete = len(status.arrived) >= min(needed, present)
    chief_heard = status.heard_s[status.chief]
    chief_is_silent = chief_heard is None or chief_heard > timeout_s / 2
    chief_is_lost = is_complete or (status.chief in status.missing and chief_is_silent)
    lost = name_replicas(status, [status.chief])
    about_chief = f" The chief is lost: replica {lost} does not end the step."
    kind = ChiefLostError if chief_is_lost else ReplicaTimeoutError
    return kind(
        f"SyncReplicasOptimizer: replica {replica} waited {waited:.1f} s for the end "
        f"of step {status.step}; wait_timeout_s is {timeout_s:g}."
        f"{about_chief if chief_is_lost else ''} Arrived: "
        f"{name_replicas(status, status.arrived)}. Missing: "
        f"{name_replicas(status, status.missing)}. Restart what is missing before the "
        "timeout, raise wait_timeout_s, or have backups (total_num_replicas above "
        "replicas_to_aggregate).",
        step=status.step,
        waited_s=waited,
        arrived=status.arrived,
        missing=status.missing,
        heard_s=status.heard_s,
    )


def overdue_s(
    parts: Sequence[np.ndarray],
    position: np.ndarray,
    replica: int,
    *,
    running_s: float,
) -> float:
    """Returns the seconds since the replica's round ended, by the server's clock.

    Where its gradient has arrived, the run has gone on, and yet the training op does
    not return, what it waits for has been lost on the way, and will not come.

    Args:
      parts: of a status, as ``read_status`` takes them.
      position: int64 [2], round and incarnation that the replica computes for.
      replica: its number.
      running_s: since when its training op runs; a gradient that arrived before
        is an earlier call's.

    Returns:
      0 where the round is in progress or the replica's gradient has not arrived.
    """
    about_run, replicas, ring = parts
    row = replicas[:, replica]
    arrived = row[[ReplicaField.ARRIVED_ROUND, ReplicaField.ARRIVED_INCARNATION]]
    current = about_run[[RunField.ROUND, RunField.INCARNATION]]
    if not np.array_equal(arrived, position) or np.array_equal(current, position):
        return 0.0
    now, arrived_at = int(about_run[-2]), int(row[ReplicaField.ARRIVED_AT])
    if (now - arrived_at) * MICROSECOND_S > running_s:
        return 0.0
    return (now - max(_ended_at(about_run, ring, position), arrived_at)) * MICROSECOND_S


def _ended_at(about_run: np.ndarray, ring: np.ndarray, position: np.ndarray) -> int:
    """Returns when a round that is over ended; 0 where the table has forgotten it."""
    round_number, incarnation = position
    if about_run[RunField.INCARNATION] != incarnation:
        # An incarnation's number is the time at which it began.
        return int(about_run[RunField.INCARNATION])
    is_remembered = about_run[RunField.ROUND] - round_number <= RING
    return int(ring[round_number % RING]) if is_remembered else 0


class Watchdog:
    """Bounds the waits of one session's training op.

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

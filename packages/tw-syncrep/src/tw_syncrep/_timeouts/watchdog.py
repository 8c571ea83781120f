"""A replica's guard: a thread that ends a wait for others when it took too long.

A call that waits inside TensorFlow cannot be interrupted from Python. The guard
wakes it with a token, as the chief does at the end of a round. Where the round is
long over and the call does not return, no token helps: the guard has the session
made anew. In an ordinary run it does nothing but tell the board now and then that
its replica lives.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_syncrep._protocol.lifecycle import SessionOps
from tw_syncrep._timeouts.errors import (
    ChiefLostError,
    ReplicaTimeoutError,
    SyncTimeoutError,
)
from tw_syncrep._timeouts.lost_reply import overdue_s
from tw_syncrep._timeouts.status import Status, name_replicas, read_status

_LONGEST_HEARTBEAT_S = 10.0
_ASKING_S = 0.5
_WAKING_S = 5.0  # Its first call has TensorFlow prune and place the graph.


def heartbeat_interval(timeout_s: float) -> float:
    """Returns how often a replica tells that it lives, in seconds."""
    return min(_LONGEST_HEARTBEAT_S, timeout_s / 4)


def judge_wait(
    status: Status, replica: int, *, timeout_s: float, needed: int
) -> SyncTimeoutError | None:
    """Tells whether a replica has waited too long, and for whom.

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
    kind = ChiefLostError if chief_is_lost else ReplicaTimeoutError
    return kind(
        _tell(status, replica, waited, timeout_s, chief_is_lost=chief_is_lost),
        step=status.step,
        waited_s=waited,
        arrived=status.arrived,
        missing=status.missing,
        heard_s=status.heard_s,
    )


def _tell(
    status: Status,
    replica: int,
    waited: float,
    timeout_s: float,
    *,
    chief_is_lost: bool,
) -> str:
    lost = name_replicas(status, [status.chief])
    about_chief = f" The chief is lost: replica {lost} does not end the step."
    arrived = name_replicas(status, status.arrived)
    return (
        f"SyncReplicasOptimizer: replica {replica} waited {waited:.1f} s for the end "
        f"of step {status.step}; wait_timeout_s is {timeout_s:g}."
        f"{about_chief if chief_is_lost else ''} Arrived: {arrived}. Missing: "
        f"{name_replicas(status, status.missing)}. Restart what is missing before the "
        "timeout, raise wait_timeout_s, or have backups (total_num_replicas above "
        "replicas_to_aggregate)."
    )


class Guard:
    """Watches the waits of one session's training op.

    Attributes:
      error: why the training op was woken, until ``end_wait``.
      is_unanswered: whether the server was asked about a long wait and was silent.
    """

    def __init__(
        self,
        session: tf.compat.v1.Session,
        ops: SessionOps,
        judge: Callable[[Status], SyncTimeoutError | None],
        *,
        replica: int,
        timeout_s: float,
        renew: Callable[[str], None],
    ) -> None:
        """Starts the thread.

        Args:
          session: not wrapped.
          ops: of the optimizer.
          judge: takes the status and returns the error, if any.
          replica: whose session it is.
          timeout_s: longest wait.
          renew: takes the reason, and has the session made anew; called at half
            of ``timeout_s``, so that the others need not give this replica up.
        """
        self.error: Exception | None = None
        self.is_unanswered = False
        self._session = session
        self._ops = ops
        self._judge = judge
        self._replica = replica
        self._timeout_s = timeout_s
        self._renew = renew
        self._heartbeat_s = heartbeat_interval(timeout_s)
        self._look_at: float | None = None
        self._began_at = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="tw-syncrep-guard", daemon=True
        )
        self._thread.start()

    def begin_wait(self) -> None:
        """Notes that the training op starts."""
        self.error = None
        self._began_at = time.monotonic()
        self._look_at = self._began_at + self._timeout_s / 2

    def end_wait(self) -> None:
        """Notes that it has returned."""
        self._look_at = None
        self.error = None
        self.is_unanswered = False

    def stop(self) -> None:
        """Ends the thread after its present call."""
        self._stopped.set()

    def _watch(self) -> None:
        next_beat = time.monotonic() + self._heartbeat_s
        # A wait that begins during a sleep ends after it: no one need wake us.
        while not self._stopped.wait(self._pause(next_beat)):
            now = time.monotonic()
            if now >= next_beat:
                self._ask(self._ops.heartbeat)
                next_beat = now + self._heartbeat_s
            look_at = self._look_at
            if look_at is not None and now >= look_at:
                self._look()

    def _pause(self, next_beat: float) -> float:
        look_at = self._look_at
        due = next_beat if look_at is None else min(next_beat, look_at)
        return max(0.0, due - time.monotonic())

    def _look(self) -> None:
        answer = self._ask([self._ops.place, *self._ops.status])
        running_s = time.monotonic() - self._began_at
        is_due = self._look_at is not None and running_s >= self._timeout_s
        self.is_unanswered = answer is None and is_due
        if answer is None:  # A lost server is for the session's bounds.
            self._look_again(in_s=_ASKING_S)
            return
        place, *parts = answer
        overdue = overdue_s(parts, place, self._replica, running_s=running_s)
        if overdue >= self._timeout_s / 2 and self._look_at is not None:
            self._give_up(int(place[0]), overdue)
            return
        status = read_status(parts)
        error = self._judge(status)
        if error is not None:
            self._look_again(in_s=self._timeout_s)
            self._fail(error, status)
        else:
            self._look_again(in_s=self._rest_of_wait(status))

    def _fail(self, error: Exception, status: Status) -> None:
        """Wakes the training op, which then has ``error`` to raise."""
        self.error = error
        place = {self._ops.place: (status.round_number, status.epoch)}
        # In a list: of a bare op, the answer is None.
        if self._ask([self._ops.wake], place, within_s=_WAKING_S) is None:
            self._look_again(in_s=_ASKING_S)

    def _give_up(self, round_number: int, overdue: float) -> None:
        self.stop()
        self._renew(
            f"SyncReplicasOptimizer: replica {self._replica} has not heard of the end "
            f"of round {round_number}, {overdue:.1f} s ago; its session is made anew."
        )

    def _rest_of_wait(self, status: Status) -> float:
        waited = [status.arrived_s[replica] or 0.0 for replica in status.arrived]
        return min(max(0.02, self._timeout_s - max(waited, default=0.0)), 1.0)

    def _look_again(self, *, in_s: float) -> None:
        if self._look_at is not None:
            self._look_at = time.monotonic() + in_s

    def _ask(
        self, fetches: Any, feed: Any = None, *, within_s: float = _ASKING_S
    ) -> Sequence[Any] | None:
        """Runs something small; None where the server does not answer in time."""
        options = tf.compat.v1.RunOptions(timeout_in_ms=int(within_s * 1000))
        try:
            answer: Sequence[Any] = self._session.run(fetches, feed, options=options)
        except (tf.errors.OpError, RuntimeError):
            return None
        return answer

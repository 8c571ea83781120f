"""What a replica waits for before its first step: the chief, and enough others.

Who starts before the chief does joins again when the chief has started: only then
is there an epoch to compute for.
"""

import time
from typing import Any

import tensorflow as tf

from tw_syncrep._protocol.graph import SyncGraph
from tw_syncrep._timeouts.errors import StartTimeoutError
from tw_syncrep._timeouts.status import Status, name_replicas, read_status

_BETWEEN_LOOKS_S = 0.05


class StartBarrier:
    """The start of one session of a replica."""

    def __init__(self, graph: SyncGraph) -> None:
        """Has not joined yet."""
        self._ops = graph.ops
        self._place = graph.replica.place
        self._own = graph.replica.index
        self._replicas = graph.meeting.replicas
        self._needed = min(graph.meeting.aggregate, graph.meeting.replicas)
        self._epoch = 0

    def join(
        self, session: tf.compat.v1.Session, op: tf.Operation, feed: Any = None
    ) -> None:
        """Joins the run with ``op``, one of the session ops."""
        session.run(op, feed)
        self._epoch = int(session.run(self._place)[1])

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
                self.join(session, self._ops.join)
            time.sleep(_BETWEEN_LOOKS_S)

    def _has_started(self, status: Status) -> bool:
        if status.is_closed:  # If before this replica came, it is for the next run.
            return self._own in status.joined
        enough = len(status.joined) + len(status.left) >= self._needed
        return status.epoch > 0 and enough and not self._is_left_out(status)

    def _is_left_out(self, status: Status) -> bool:
        """Tells whether the chief has started since this replica joined."""
        if not status.epoch or status.is_closed:
            return False
        return status.epoch != self._epoch or self._own not in status.joined

    def _timeout(
        self, status: Status, waited_s: float, timeout_s: float
    ) -> StartTimeoutError:
        started = {self._own} if status.is_closed else {self._own, *status.joined}
        missing = sorted(set(range(self._replicas)) - started)
        return StartTimeoutError(
            f"SyncReplicasOptimizer: replica {self._own} waited {waited_s:.1f} s for "
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
        return read_status(session.run(self._ops.status))


def _about_chief(status: Status) -> str:
    if status.is_closed:
        return " The chief has ended the run and has not begun another."
    return "" if status.epoch else " The chief has not started."

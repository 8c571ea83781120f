"""A replica's wait before its first step, for the chief and enough other replicas."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import tensorflow as tf

from tw_core.internal import Recorder
from tw_syncrep._errors import ReplicaReplacedError, StartTimeoutError
from tw_syncrep._protocol.graph import SyncGraph
from tw_syncrep._protocol.run_table import REFUSED
from tw_syncrep._timeouts.reports import report_run
from tw_syncrep._timeouts.status import (
    Status,
    longest_pause_s,
    name_replicas,
    read_status,
)

_log = logging.getLogger("tw_syncrep")

_SHORTEST_PAUSE_S = 0.05
_PAUSE_PER_WAIT = 1 / 8


@dataclass(eq=False)
class StartBarrier:
    """The start of a replica's session, which needs the chief and enough replicas.

    A replica that starts before the chief joins again once the chief has started:
    only then is there an incarnation to compute for.
    """

    graph: SyncGraph
    session: tf.compat.v1.Session
    _: KW_ONLY
    events: Recorder
    life: int = 0
    at_least: int | None = None  # replicas that suffice at the timeout; None: all
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    is_passed: bool = field(init=False, default=False)
    incarnation: int = field(init=False, default=0)
    number: int = field(init=False, default=0)  # of the session; later ones are greater

    def __post_init__(self) -> None:
        """Checks that all variables have values; does not join yet."""
        graph, session = self.graph, self.session
        names = [name.decode() for name in session.run(graph.uninitialized)]
        if names:
            raise RuntimeError(
                "SyncReplicasOptimizer: the model is not ready: these variables have "
                f"no value: {', '.join(names)}. Add them to the init_op, or create "
                "them before the session."
            )
        self._needed = min(graph.aggregate, graph.replicas)
        self._name = f"replica {graph.replica}"
        self.life = self.life or int(session.run(graph.ops.draw))

    def join(self, op: tf.Operation, feed: Mapping[Any, Any] | None = None) -> int:
        """Joins the run with ``op``, the graph's op ``join`` or ``open``."""
        self.session.run(op, {**(feed or {}), self.graph.ops.life: self.life})
        fetches = [self.graph.position, self.graph.session]
        position, number = self.session.run(fetches)
        self.incarnation, self.number = int(position[1]), int(number)
        if self.number == REFUSED:
            raise ReplicaReplacedError(self.graph.replica)
        self.events.noted("joined", self._name, "incarnation", self.incarnation)
        return self.incarnation

    def wait(self, session: tf.compat.v1.Session, *, timeout_s: float | None) -> None:
        """Waits until the chief and enough replicas have started.

        Polls 20 times a second at first, then less and less often: a start is noticed
        after at most another eighth of the wait. Returns at once if the run that this
        replica has joined has ended: its step will stop it.
        """
        with self.events.during(self._name, "the wait for the others' start"):
            self._poll(session, timeout_s)
        self.is_passed = True

    def _poll(self, session: tf.compat.v1.Session, timeout_s: float | None) -> None:
        ops, began = self.graph.ops, self.clock()
        longest_s = longest_pause_s(self.graph.replicas)
        while not self._has_started(status := read_status(session.run(ops.status))):
            waited_s = self.clock() - began
            if timeout_s is not None and waited_s >= timeout_s:
                if not self._is_enough(status):
                    raise self._timeout(status, waited_s, timeout_s)
                self._evict(session, status)
                return
            pause_s = min(max(_SHORTEST_PAUSE_S, waited_s * _PAUSE_PER_WAIT), longest_s)
            if self._is_left_out(status):
                self.join(ops.join)
                pause_s = _SHORTEST_PAUSE_S  # That may have been all that was missing.
            if timeout_s is not None:
                pause_s = min(pause_s, timeout_s - waited_s)
            self.sleep(pause_s)

    def _is_enough(self, status: Status) -> bool:
        """Returns whether an elastic run may begin without the missing replicas."""
        if self.at_least is None or not status.incarnation or status.is_closed:
            return False
        return not self._is_left_out(status) and len(status.joined) >= self.at_least

    def _evict(self, session: tf.compat.v1.Session, status: Status) -> None:
        ops, position = self.graph.ops, (status.round_number, status.incarnation)
        whom = [int(n not in status.joined) for n in range(self.graph.replicas)]
        session.run(ops.evict, {ops.position: position, ops.whom: whom})
        missing = [n for n, is_missing in enumerate(whom) if is_missing]
        _log.warning(
            "SyncReplicasOptimizer: replica(s) %s have not started; the run begins "
            "without them.",
            name_replicas(status, missing),
        )

    def _has_started(self, status: Status) -> bool:
        if status.is_closed:  # A replica that joins later is in the next run.
            return self.graph.replica in status.joined
        there = {*status.joined, *status.left, *status.evicted}
        enough = len(there) >= self._needed
        return status.incarnation > 0 and enough and not self._is_left_out(status)

    def _is_left_out(self, status: Status) -> bool:
        """Returns whether the chief has started since this replica joined."""
        if not status.incarnation or status.is_closed:
            return False
        is_older = status.incarnation != self.incarnation
        return is_older or self.graph.replica not in status.joined

    def _timeout(
        self, status: Status, waited_s: float, timeout_s: float
    ) -> StartTimeoutError:
        own = self.graph.replica
        started = {own} if status.is_closed else {own, *status.joined}
        missing = sorted(set(range(self.graph.replicas)) - started)
        about_chief = "" if status.incarnation else " The chief has not started."
        if status.is_closed:
            about_chief = " The chief has ended the run and has not begun another."
        error = StartTimeoutError(
            f"SyncReplicasOptimizer: replica {own} waited {waited_s:.1f} s for "
            f"the others to start (start_timeout_s is {timeout_s:g}); {self._needed} "
            f"replicas are needed.{about_chief} Started: "
            f"{name_replicas(status, sorted(started))}. Missing: "
            f"{name_replicas(status, missing)}. Start them, or raise start_timeout_s.",
            waited_s=waited_s,
            arrived=sorted(started),
            missing=missing,
            heard_s=status.heard_s,
        )
        return report_run(error, status, self.events, replica=own, deadline_s=timeout_s)

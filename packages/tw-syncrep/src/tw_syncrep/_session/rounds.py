"""Work of a session around its calls: numbers batches, runs the chief's rounds."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tw_syncrep._errors import ChiefLostError, SyncTimeoutError
from tw_syncrep._protocol.graph import SyncGraph
from tw_syncrep._timeouts.status import (
    Status,
    find_evicted,
    is_acting,
    is_silent,
    name_replicas,
    read_status,
)
from tw_syncrep._timeouts.steady_times import SteadyTimes

_log = logging.getLogger("tw_syncrep")

_BATON_S = 5.0


class BatchStamps:
    """Numbers a replica's batches, so that each counts once.

    If a session is replaced during a call, TensorFlow makes the call again, with the
    same feed: its batch keeps its stamp. Stamps grow from the session's number, a time.

    >>> stamps = BatchStamps()
    >>> stamps.begin_session(100)
    >>> stamps.begin_call()
    101
    >>> stamps.begin_session(200)
    >>> stamps.begin_call()
    101
    >>> stamps.is_repeated
    True
    >>> stamps.end_call()
    >>> stamps.begin_call()
    201
    """

    def __init__(self) -> None:
        self._last = 0
        self._number = 0
        self._has_returned = True
        self._is_again = False
        self.is_repeated = False  # whether the last call was made again

    def begin_session(self, number: int) -> None:
        """Records that a session has joined; a pending call will be made again."""
        self._number = number
        self._is_again = not self._has_returned

    def begin_call(self) -> int:
        """Returns the stamp of a training call's batch."""
        self.is_repeated = self._is_again
        if not self._is_again:
            self._last = max(self._last, self._number) + 1
        self._has_returned = self._is_again = False
        return self._last

    def end_call(self) -> None:
        """Records that the call has returned."""
        self._has_returned = True


@dataclass(eq=False, kw_only=True)
class ChiefRole:
    """Whether this process acts as the chief, and the rounds that it then runs.

    In an elastic run any replica may, if the chief is lost. The rounds run in a thread
    outside the coordinator, which joins its threads at the end, when this one still
    waits for gradients that will not arrive.
    """

    graph: SyncGraph
    is_chief: bool
    initial: Sequence[int]
    timeout_s: float
    min_replicas: int | None  # None unless the run is elastic
    times: SteadyTimes
    on_failure: Callable[[Exception], None]  # The replica's own step may not notice.
    # A watchdog may take over while a session ends.
    _lock: Any = field(init=False, default_factory=threading.Lock)
    _session: tf.compat.v1.Session | None = field(init=False, default=None)
    _stopped: threading.Event | None = field(init=False, default=None)

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on without replicas that are lost."""
        return self.min_replicas is not None

    @property
    def is_acting(self) -> bool:
        """Whether this process runs the rounds."""
        return self._stopped is not None

    @property
    def ends_run(self) -> bool:
        """Whether the run ends with this replica."""
        return self.is_acting if self.is_elastic else self.is_chief

    def begin(self, session: tf.compat.v1.Session, join: Callable[..., int]) -> None:
        """Joins the run in a new session, as the chief or as another replica.

        In an elastic run the chief joins like any replica if another acts in its place,
        and an acting one continues to act if only its session was lost.
        """
        acts = self._is_to_act(session)
        self.release()
        self._session = session
        ops = self.graph.ops
        if acts:
            self._start(session, join(ops.open, {ops.initial: self.initial}))
        else:
            join(ops.join)

    def recover(
        self,
        session: tf.compat.v1.Session,
        ask: Callable[..., Sequence[Any] | None],
        error: SyncTimeoutError,
        status: Status,
    ) -> bool:
        """Lets an elastic run go on without lost replicas, in the watchdog's thread."""
        graph, ops = self.graph, self.graph.ops
        evicted = find_evicted(
            status,
            error,
            graph.replica,
            timeout_s=self.timeout_s,
            min_replicas=self.min_replicas or 1,
        )
        if evicted is None:
            return False
        feed: dict[Any, Any] = {
            ops.position: (status.round_number, status.incarnation),
            ops.whom: [int(n in evicted) for n in range(graph.replicas)],
        }
        if not isinstance(error, ChiefLostError):
            _log.warning(
                "SyncReplicasOptimizer: replica %d goes on without replica(s) %s: no "
                "gradient for step %d.",
                *(graph.replica, name_replicas(status, evicted), status.step),
            )
            return ask([ops.evict], feed, timeout_s=_BATON_S) is not None
        if is_silent(status, status.chief, within_s=self.timeout_s / 2):
            ask([ops.release])  # It may have been lost while saving.
        feed[ops.initial] = self.initial
        answer = ask([ops.take_over], feed, timeout_s=_BATON_S)
        if answer is None:
            return False
        incarnation, has_begun = map(int, answer[0])
        if incarnation <= 0:  # The chief restores the variables.
            return False
        if has_begun:
            _log.warning(
                "SyncReplicasOptimizer: replica %d acts as the chief from step %d on, "
                "in place of replica %s.",
                *(graph.replica, status.step),
                name_replicas(status, [status.chief]),
            )
            self._start(session, incarnation)
        return True

    def gives_way(self, session: tf.compat.v1.Session) -> bool:
        """Stops acting if an elastic run's table names another chief."""
        if not self.is_elastic:
            return False
        options = tf.compat.v1.RunOptions(timeout_in_ms=int(_BATON_S * 1000))
        try:
            parts = session.run(self.graph.ops.status, options=options)
        except (tf.errors.OpError, RuntimeError):
            return False
        if read_status(parts).chief == self.graph.replica:
            return False
        with self._lock:
            self._stop()
        return True

    def pause(self) -> None:
        """Prevents further rounds, and reports of failures, in this session."""
        with self._lock:
            self._session = None
            if self._stopped is not None:
                self._stopped.set()

    def release(self) -> None:
        """Stops acting, and ends the rounds of the session."""
        self.pause()
        self._stop()

    def _stop(self) -> None:
        if self._stopped is not None:
            self._stopped.set()
        self._stopped = None

    def _is_to_act(self, session: tf.compat.v1.Session) -> bool:
        if not self.is_elastic:
            return self.is_chief
        parts = session.run(self.graph.ops.status)
        status = read_status(self.times.restate(parts))
        if status.chief == self.graph.replica:
            return self.is_chief or self.is_acting
        return self.is_chief and not is_acting(status, within_s=self.timeout_s)

    def _start(self, session: tf.compat.v1.Session, incarnation: int) -> None:
        """Starts the rounds of an incarnation; they end with their session."""
        graph = self.graph
        run_round = session.make_callable(graph.round_op, [graph.incarnation])
        with self._lock:
            if self._session is not session:
                return
            self._stop()
            stopped = self._stopped = threading.Event()

        def run() -> None:
            while not stopped.is_set():
                try:
                    run_round(incarnation)
                except Exception as error:
                    if not stopped.is_set():
                        self.on_failure(error)
                    return

        threading.Thread(target=run, name="tw-syncrep-chief", daemon=True).start()

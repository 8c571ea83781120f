"""Which waits are too long and for whom; when a call is given up.

Private modules are imported because deadlines of real clusters take minutes: here
the clock, the servers and the run table are fakes.
"""

import dataclasses
import errno
import logging
import os
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from harness.processes import wait_until
from syncrep_given import missing_in

from tw_core.internal import Recorder
from tw_syncrep import (
    ChiefLostError,
    ReplicaTimeoutError,
    ServerLostError,
    StartTimeoutError,
    SyncTimeoutError,
)
from tw_syncrep._protocol.run_table import RING, ReplicaField, RunField
from tw_syncrep._session.bounded_session import (
    AbandonedError,
    SessionCalls,
    TrainingSession,
)
from tw_syncrep._timeouts.reports import report_run
from tw_syncrep._timeouts.server_monitor import (
    ServerMonitor,
    find_fault,
    find_faults,
    find_parted,
)
from tw_syncrep._timeouts.status import (
    find_evicted,
    format_status,
    is_acting,
    is_held_by_others,
    judge_absence,
    judge_wait,
    longest_pause_s,
    overdue_s,
    read_status,
)
from tw_syncrep._timeouts.steady_times import SteadyTimes
from tw_syncrep._timeouts.watchdog import Watchdog, heartbeat_interval

NOW = 1_000_000_000
INCARNATION = NOW - 60_000_000


def parts(replicas=3):
    """A run table on which replicas 0 and 1 have waited for 10 seconds for 2."""
    run = np.zeros(len(RunField) + 2, np.int64)
    run[[RunField.ROUND, RunField.INCARNATION, RunField.DROPPED]] = (
        7,
        NOW - 60_000_000,
        4,
    )
    run[-2:] = NOW, 37
    rows = np.zeros([len(ReplicaField) + 1, replicas], np.int64)
    rows[ReplicaField.ARRIVED_ROUND] = [7, 7, 6]
    rows[ReplicaField.ARRIVED_INCARNATION] = NOW - 60_000_000
    rows[[ReplicaField.ARRIVALS, -1]] = 1
    rows[ReplicaField.ARRIVED_AT] = [
        NOW - 10_000_000,
        NOW - 9_000_000,
        NOW - 12_000_000,
    ]
    rows[ReplicaField.HEARD] = [NOW - 1_000_000, NOW, NOW - 12_000_000]
    rows[ReplicaField.JOINED] = 1
    ring = np.zeros(RING, np.int64)
    ring[:7] = NOW - np.arange(7) * 500_000
    return run, rows, ring


def status(**changes):
    return dataclasses.replace(read_status(parts()), **changes)


def test_a_status_is_read_from_the_run_table():
    read = status()
    assert (read.step, read.round_number, read.dropped) == (37, 7, 4)
    assert (read.arrived, read.missing, read.joined) == ((0, 1), (2,), (0, 1, 2))
    assert read.waiting_s == pytest.approx(10.0)
    assert read.steps_per_s == pytest.approx(2.0)
    assert read.heard_s == pytest.approx((1.0, 0.0, 12.0))
    run, rows, ring = parts()
    rows[ReplicaField.ARRIVED_INCARNATION, 1] -= 1  # An older one's do not count.
    assert read_status([run, rows, ring]).arrived == (0,)


def test_a_run_is_held_by_others_that_have_trained_and_are_there():
    run, rows, ring = parts()
    rows[ReplicaField.LIFE] = 100
    assert not is_held_by_others([run, rows, ring], 0, within_s=5)
    rows[ReplicaField.COUNTED, 1], rows[ReplicaField.COUNTED_ROUND, 1] = 107, 5
    assert is_held_by_others([run, rows, ring], 0, within_s=5)
    assert not is_held_by_others([run, rows, ring], 1, within_s=5)
    rows[ReplicaField.HEARD, 1] = NOW - 6_000_000
    assert not is_held_by_others([run, rows, ring], 0, within_s=5)
    rows[ReplicaField.HEARD, 1] = NOW
    rows[ReplicaField.LIFE, 1] = 108  # has started again since
    assert not is_held_by_others([run, rows, ring], 0, within_s=5)


def test_the_line_tells_all_of_it():
    assert format_status(status(left=(1,), evicted=(2,), is_closed=True)) == (
        "step 37, 2.0 steps/s, arrived 0 1, missing 2 (heard 12.0 s ago), 4 stale "
        "gradients dropped, waiting 10.0 s, left 1, evicted 2 (heard 12.0 s ago), "
        "closed by the chief"
    )


def test_who_was_evicted_is_neither_missing_nor_has_it_left():
    run, rows, ring = parts()
    rows[ReplicaField.LEFT] = [0, 1, -1]
    run[RunField.EVICTED] = 3
    read = read_status([run, rows, ring])
    assert (read.missing, read.left, read.evicted) == ((), (1,), (2,))
    assert (read.joined, read.evictions) == ((0,), 3)
    run[RunField.RUN] = 1  # The marks are an earlier run's.
    read = read_status([run, rows, ring])
    assert (read.left, read.evicted) == ((), ())


def evicted(error=ReplicaTimeoutError, *, replica=0, min_replicas=1, **changes):
    return find_evicted(
        status(**changes),
        error("late"),
        replica,
        timeout_s=10,
        min_replicas=min_replicas,
    )


def test_an_elastic_run_goes_on_without_those_that_have_not_arrived():
    assert evicted() == (2,)
    assert evicted(min_replicas=2) == (2,)
    assert evicted(min_replicas=3) is None
    heard_s = (0.0, 0.0, 0.1)  # It lives, but has not come for as long.
    assert evicted(heard_s=heard_s) == (2,)


def test_a_lost_chief_is_replaced_and_only_the_silent_are_evicted_with_it():
    lost = {"error": ChiefLostError, "chief": 2, "min_replicas": 1}
    assert evicted(**lost) == (2,)
    apart = {"arrived": (0,), "missing": (1, 2)}
    assert evicted(**lost, **apart) == (2,)
    silent = {"heard_s": (0.0, 5.1, None)}
    assert evicted(**lost, **apart, **silent) == (1, 2)
    assert evicted(**(lost | {"min_replicas": 2}), **apart, **silent) is None
    # A chief whose own rounds do not end begins anew, and stays.
    own = evicted(ChiefLostError, chief=0, missing=())
    assert own == ()


def test_a_chief_acts_while_it_is_heard_from_in_a_run_that_is_open():
    assert is_acting(status(chief=1, incarnation=5), within_s=1)
    assert not is_acting(status(chief=2), within_s=10)
    assert not is_acting(status(chief=1, is_closed=True), within_s=1)
    assert not is_acting(status(chief=1, incarnation=0), within_s=1)
    assert not is_acting(status(chief=1, joined=(0, 2)), within_s=1)


@pytest.mark.parametrize(
    ("changes", "replica", "timeout_s", "needed", "kind"),
    [
        ({}, 0, 10.5, 3, None),
        ({}, 2, 1, 3, None),  # It computes.
        ({"chief": 2}, 0, 10, 3, ChiefLostError),
        ({"chief": 2, "heard_s": (1.0, 0.0, 0.5)}, 0, 10, 3, ReplicaTimeoutError),
        ({}, 0, 10, 2, ChiefLostError),  # The round is complete, and does not end.
    ],
)
def test_a_wait_beyond_the_timeout_is_an_error_of(
    changes, replica, timeout_s, needed, kind
):
    error = judge_wait(status(**changes), replica, timeout_s=timeout_s, needed=needed)
    assert kind is None if error is None else type(error) is kind
    if changes == {"chief": 2}:
        assert "The chief is lost: replica 2 (heard 12.0 s ago)" in str(error)


def test_missing_replicas_are_named_with_when_they_were_heard():
    error = judge_wait(status(), 0, timeout_s=10, needed=3)
    assert type(error) is ReplicaTimeoutError
    assert (error.step, error.arrived, error.missing) == (37, (0, 1), (2,))
    assert error.waited_s == pytest.approx(10.0)
    assert error.heard_s == pytest.approx((1.0, 0.0, 12.0))
    assert str(error) == (
        "SyncReplicasOptimizer: replica 0 waited 10.0 s for the end of step 37; "
        "wait_timeout_s is 10. Arrived: 0 (heard 1.0 s ago), 1 (heard 0.0 s ago). "
        "Missing: 2 (heard 12.0 s ago). Restart missing replicas before the timeout, "
        "raise wait_timeout_s, or add backups (total_num_replicas above "
        "replicas_to_aggregate)."
    )


def test_a_replica_that_owes_a_second_gradient_is_missing():
    run, rows, ring = parts()
    rows[-1, 1] = 2
    before = read_status([run, rows, ring])
    assert (before.arrived, before.missing) == ((0,), (1, 2))
    rows[ReplicaField.LEFT, 2] = 1
    error = judge_wait(read_status([run, rows, ring]), 0, timeout_s=10, needed=4)
    assert type(error) is ReplicaTimeoutError
    assert (error.arrived, error.missing) == ((0,), (1,))
    rows[ReplicaField.ARRIVALS, 1] = 2
    error = judge_wait(read_status([run, rows, ring]), 0, timeout_s=9, needed=4)
    assert type(error) is ChiefLostError


def test_heartbeats_and_questions_are_rarer_with_the_timeout_and_the_replicas():
    assert [heartbeat_interval(seconds) for seconds in (2.0, 6000.0)] == [0.5, 10.0]
    assert [longest_pause_s(count) for count in (1, 100, 1000)] == [1.0, 1.0, 10.0]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Answering:
    """A session in which the first call of ``slow`` takes too long.

    It does not return while ``goes_on`` is cleared, as when its server is stopped.
    """

    def __init__(self, slow=None, position=(7, INCARNATION)):
        self.slow = slow
        self.position = np.array(position)
        self.parts = parts
        self.calls = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def run(self, fetches, feed_dict=None, options=None):
        self.goes_on.wait(30)
        self.calls.append((fetches, feed_dict))
        if fetches == [self.slow] and len(self.of(fetches)) == 1:
            raise tf.errors.DeadlineExceededError(None, None, "slow")
        return (
            [self.position, *self.parts()]
            if fetches == ["position", "status"]
            else [None]
        )

    def of(self, fetches):
        return [call for call in self.calls if call[0] == fetches]


OPS = SimpleNamespace(
    heartbeat="heartbeat",
    wake="wake",
    position="position",
    status=["status"],
    evict="evict",
    take_over="take over",
)


class Driven(Watchdog):
    """A watchdog without its thread, whose clock is set."""

    def _run(self):
        pass

    def go_on(self, seconds):
        """Does what its thread would do in a time, tenth by tenth."""
        for _ in range(round(10 * seconds)):
            self.clock.now = round(self.clock.now + 0.1, 6)
            if not self._stopped.is_set() and self.clock.now >= self._check_at:
                self._check()


def watchdog_of(
    session,
    judge=lambda _: None,
    *,
    kind=Driven,
    replica=0,
    replace_session=pytest.fail,
    absent=lambda _: None,
    recover=None,
):
    """A watchdog that has asked everything once, before anything is slow."""
    slow, session.slow = session.slow, None
    clock = Clock() if kind is Driven else time.monotonic
    watchdog = kind(
        session,
        OPS,
        judge,
        absent,
        replica=replica,
        timeout_s=2.0,
        replace_session=replace_session,
        recover=recover,
        events=Recorder("SyncReplicasOptimizer"),
        times=SteadyTimes(clock),
        clock=clock,
    )
    asked = ["heartbeat", ["position", "status"], ["wake"]]
    asked += [["evict", "take over"]] if recover else []
    assert [call[0] for call in session.calls] == asked
    session.calls.clear()
    session.slow = slow
    return watchdog


def test_a_watchdog_of_many_replicas_looks_more_rarely_and_not_after_the_timeout():
    watchdog = watchdog_of(Answering())
    pauses = {
        replicas: watchdog._rest_of_wait(status(arrived=(), heard_s=(0.0,) * replicas))
        for replicas in (3, 150, 1000)
    }
    assert pauses == {3: 1.0, 150: 1.5, 1000: 2.0}


def test_a_wake_that_did_not_arrive_is_sent_again_soon():
    session = Answering(slow="wake")
    overdue = ReplicaTimeoutError("overdue")
    watchdog = watchdog_of(session, lambda _: overdue)
    watchdog.begin_wait()
    for count in (1, 2):
        watchdog.go_on(0.5)
        assert session.of(["wake"]) == [(["wake"], {"position": (7, INCARNATION)})] * (
            count
        )
    assert watchdog.error is overdue
    watchdog.begin_wait()
    assert watchdog.error is None


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_wait_that_is_over_its_deadline_ends_unless_the_run_goes_on(goes_on):
    session = Answering()
    late = ReplicaTimeoutError("late")
    judged = []

    def recover(ask, error, read):
        judged.append((error, read.step))
        assert ask(["evict"]) == [None]
        return goes_on

    watchdog = watchdog_of(session, lambda _: late, recover=recover)
    watchdog.begin_wait()
    watchdog.go_on(1.0)
    assert judged == [(late, 37)] * (2 if goes_on else 1)
    assert len(session.of(["wake"])) == (0 if goes_on else 1)
    assert watchdog.error is (None if goes_on else late)


def test_a_training_op_that_does_not_end_though_it_was_woken_is_left_behind():
    late = ReplicaTimeoutError("late")
    watchdog = watchdog_of(Answering(), lambda _: late)
    watchdog.begin_wait()
    watchdog.go_on(5.4)
    assert (watchdog.error, watchdog.given_up) == (late, None)
    watchdog.go_on(0.1)
    assert watchdog.given_up is late


def test_who_was_evicted_and_does_not_arrive_gets_a_new_session():
    session = Answering()
    run, rows, ring = parts()
    rows[ReplicaField.LEFT, 2] = -1
    session.parts = lambda: [run, rows, ring]
    reasons = []
    watchdog = watchdog_of(session, replica=2, replace_session=reasons.append)
    watchdog.begin_wait()
    watchdog.go_on(3.9)
    assert not reasons
    watchdog.go_on(0.1)
    assert "the run goes on without replica 2" in reasons[0]
    assert watchdog.given_up is None


def test_a_session_whose_reply_is_lost_is_replaced_and_judged_no_more():
    # Its gradient for round 6 arrives now and the round ends; then nothing comes.
    lost, reasons = Answering(position=(6, INCARNATION)), []
    watchdog = watchdog_of(lost, replica=2, replace_session=reasons.append)

    def after_a_while():
        run, rows, ring = parts()
        run[-2] = NOW + int(watchdog.clock.now * 1e6)
        rows[ReplicaField.ARRIVED_AT, 2] = ring[6] = NOW
        return [run, rows, ring]

    watchdog.begin_wait()
    lost.parts = after_a_while
    watchdog.go_on(10)
    (reason,) = reasons
    assert reason.startswith(
        "SyncReplicasOptimizer: replica 2 did not learn of the end of round 6, 1."
    )
    wakes = lost.of(["wake"])
    assert len(wakes) >= 2, "a wake-up may be enough"
    assert wakes[0][1] == {"position": (6, INCARNATION)}


# In the second the step computes at first, and the server answers.
@pytest.mark.parametrize(
    ("waits", "answered_s"), [(True, 0.0), (True, 2.5), (False, 0.0)]
)
def test_a_question_that_does_not_return_is_unanswered_after_the_timeout(
    waits, answered_s
):
    session = Answering()
    watchdog = watchdog_of(session)
    if waits:
        watchdog.begin_wait()
    watchdog.clock.now = answered_s
    if answered_s:
        watchdog._check()
    session.goes_on.clear()
    ask = watchdog._check if waits else lambda: watchdog._ask(OPS.heartbeat)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    wait_until(lambda: watchdog._asked_at is not None, within_s=10)
    for later_s, is_unanswered in ((0.0, False), (1.9, False), (2.0, True)):
        watchdog.clock.now = answered_s + later_s
        assert watchdog.is_unanswered is is_unanswered
    session.goes_on.set()
    asking.join(10)
    assert not watchdog.is_unanswered


@pytest.mark.parametrize("waits", [True, False])
def test_a_heartbeat_answers_no_question_of_a_step_that_waits(waits):
    """Where servers do not reach this task, nothing else gets through to them."""
    session = Answering()
    watchdog = watchdog_of(session)
    answer, heartbeat = session.run, OPS.heartbeat

    def run(fetches, *arguments, **settings):
        if fetches is not heartbeat:
            raise tf.errors.UnavailableError(None, None, "failed to connect")
        return answer(fetches, *arguments, **settings)

    if waits:
        watchdog.begin_wait()
    session.run = run
    watchdog._check()
    watchdog.clock.now = 1.0
    watchdog._ask(heartbeat)
    watchdog.clock.now = 2.0
    assert watchdog.is_unanswered == waits
    session.run = answer
    watchdog._check()
    assert not watchdog.is_unanswered


def test_a_session_that_was_closed_is_watched_no_more():
    session = Answering()
    watchdog = watchdog_of(session, kind=Watchdog)

    def closed(*args, **settings):
        raise RuntimeError("Attempted to use a closed Session.")

    session.run = closed
    watchdog.begin_wait()
    wait_until(lambda: not watchdog._thread.is_alive(), within_s=10)
    assert not watchdog.is_unanswered


def test_a_step_that_neither_returns_nor_arrives_is_logged_and_given_up(caplog):
    caplog.set_level(logging.WARNING, "tw_syncrep")
    given_up = ReplicaTimeoutError("given up")
    watchdog = watchdog_of(Answering(), replica=2, absent=lambda status: given_up)
    watchdog.begin_wait()
    watchdog.go_on(1.9)
    assert watchdog.given_up is None
    watchdog.go_on(0.1)
    assert watchdog.given_up is given_up
    (record,) = caplog.records
    assert "the training op of replica 2 has run for 0.5 s" in record.getMessage()
    assert "The server's status: step 37" in record.getMessage()


@pytest.mark.parametrize("chief, says", [(0, ""), (2, ", is the chief")])
def test_a_report_tells_what_every_replica_is_inside_of(chief, says):
    events = Recorder("SyncReplicasOptimizer, replica 0 of 3")
    read = status(chief=chief)
    error = ReplicaTimeoutError(
        "late", step=37, waited_s=10, arrived=(0, 1), missing=(2,)
    )
    report_run(error, read, events, replica=0, deadline_s=10)
    computes = (
        "replica 2: is inside its step of round 7; last arrival 12.0 s ago"
        f"{says}; heard 12.0 s ago"
    )
    assert missing_in(error.report) == [computes]
    assert "waits for the end of round 7 (step 37)" in error.report
    assert "arrived   replica 0, replica 1\n" in error.report
    assert "replica 1: arrived in round 7, 9.0 s ago; heard 0.0 s" in error.report
    left = dataclasses.replace(read, left=(1,), evicted=(2,), arrived=(0,), joined=())
    report_run(error, left, events, replica=0, deadline_s=10)
    assert "replica 1: has left the run" in error.report
    assert "replica 2: was evicted" in error.report
    # A chief that does not end the round is missing though it has arrived.
    error = judge_wait(status(arrived=(0, 1, 2), missing=()), 1, timeout_s=9, needed=3)
    report_run(error, status(), Recorder("me"), replica=1, deadline_s=9)
    assert missing_in(error.report) == [
        "replica 0: is the chief, and has not ended the round; heard 1.0 s ago"
    ]


def test_others_that_have_waited_for_too_long_have_given_a_replica_up():
    error = judge_absence(status(), 2, timeout_s=10, needed=3)
    assert type(error) is ReplicaTimeoutError
    assert error.missing == (2,)
    assert "the gradient of replica 2 for step 37 has not arrived" in str(error)
    assert judge_absence(status(), 2, timeout_s=100, needed=3) is None
    assert judge_absence(status(), 2, timeout_s=10, needed=2) is None
    assert judge_absence(status(), 0, timeout_s=10, needed=3) is None


POSITIONS = {
    "computes for this round": (2, (7, INCARNATION), 0.0),
    "waits in this round": (0, (7, INCARNATION), 0.0),
    "arrived, and the round is over": (2, (6, INCARNATION), 3.0),
    "brought its gradient after the end": (2, (6, INCARNATION), 1.0),
    "computes for a round that is over": (2, (5, INCARNATION), 0.0),
    "computes again for the round it arrived in": (2, (6, INCARNATION), 0.0),
    "arrived in an older incarnation": (2, (6, INCARNATION - 1), 5.0),
    "arrived more rounds ago than the table remembers": (2, (6, INCARNATION), 12.0),
}


@pytest.mark.parametrize("case", POSITIONS)
def test_a_reply_is_overdue_from_when_it_could_have_come(case):
    replica, position, want = POSITIONS[case]
    run, rows, ring = parts()
    ring[6] = NOW - 3_000_000
    if case.startswith("brought"):
        rows[ReplicaField.ARRIVED_AT, 2] = NOW - 1_000_000
    if position[1] != INCARNATION:
        rows[ReplicaField.ARRIVED_INCARNATION, 2] = position[1]
        run[RunField.INCARNATION] = NOW
        run[RunField.BEGUN_AT] = NOW - 5_000_000
    if "more rounds ago" in case:
        run[RunField.ROUND] = 6 + RING + 1
    running_s = 11.9 if "again" in case else 12.1
    found = overdue_s(
        [run, rows, ring], np.array(position), replica, running_s=running_s
    )
    assert found == pytest.approx(want)


class Watch:
    """A monitor of servers whose clock and whose probe are fakes."""

    def __init__(self, faults, **settings):
        settings = {"servers": {"ps 0": "h:1"}, "timeout_s": 5.0, **settings}
        self.clock = Clock()
        self.monitor = ServerMonitor(
            "a step", clock=self.clock, probe=lambda _: dict(faults), **settings
        )

    def at(self, *times):
        """Checks at these times; returns in how many seconds to check again."""
        for self.clock.now in times:
            pause_s = self.monitor.check()
        return pytest.approx(pause_s)


SILENT = {"ps 0": "ps 0 (h:1) does not answer"}


def test_servers_may_be_silent_for_the_timeout_and_no_longer():
    watch = Watch(SILENT)
    assert watch.at(20.0) == 0.5
    # It may have been silent since half a second before; a probe takes 0.4 s.
    assert watch.at(24.0) == 0.1
    says = r"a step has waited 24.5 s.*5.0 s.*h:1"
    with pytest.raises(ServerLostError, match=says) as raised:
        watch.at(24.5)
    assert raised.value.servers == ("ps 0 (h:1) does not answer",)
    assert Watch(SILENT, timeout_s=None).at(0.0, 1e6) == 0.5
    # Those that answer again get the whole timeout again.
    faults = dict(SILENT)
    watch = Watch(faults)
    watch.at(0.0)
    faults.clear()
    watch.at(4.0)
    faults.update(SILENT)
    assert watch.at(6.0) == 0.5


def test_an_unanswered_question_is_a_silence_that_with_addresses_has_to_last():
    with pytest.raises(ServerLostError, match="the one that holds the global step"):
        Watch({}, servers={}, unanswered=lambda: True).at(0.0)
    is_unanswered = True
    watch = Watch({}, unanswered=lambda: is_unanswered)
    assert watch.at(20.0) == 0.5
    assert watch.at(24.0) == 0.1
    is_unanswered = False
    watch.at(24.0)
    is_unanswered = True
    assert watch.at(26.0) == 0.5
    says = (
        r"not answered for 5.0 s.*global step, though.* cannot reach this task: check"
    )
    with pytest.raises(ServerLostError, match=says) as raised:
        watch.at(30.5)
    assert "Then restart the whole run from its last" in str(raised.value)
    assert "Restart" not in str(raised.value)  # They run.


def test_a_start_is_bounded_though_servers_answer():
    watch = Watch({}, limit_s=3.0)
    watch.at(0.0)
    with pytest.raises(StartTimeoutError, match="all parameter servers answer"):
        watch.at(3.0)


def test_making_a_session_anew_is_bounded_though_servers_answer():
    faults, since = {}, None
    watch = Watch(faults, remade_since=lambda: since, own="worker 0 at h:2")
    watch.at(20.0)  # The step computes.
    since = 20.0
    faults.update(SILENT)
    watch.at(23.0)
    faults.clear()
    watch.at(24.0, 28.9)  # A server that restarts has the whole timeout for the rest.
    says = r"losing and recreating its session for 5.0 s"
    with pytest.raises(SyncTimeoutError, match=says) as raised:
        watch.at(29.0)
    assert "they cannot reach worker 0 at h:2: check its port" in str(raised.value)


def test_a_session_that_fails_again_soon_is_still_being_made():
    clock = Clock()
    calls = SessionCalls(5.0, clock)
    assert calls.remade_since is None
    calls.begin_making()
    assert calls.remade_since == 0.0
    for clock.now in (1.0, 2.0, 3.0):
        calls.before_run(None)
        assert calls.remade_since is None
        clock.now += 0.5
        calls.begin_making()
        assert calls.remade_since == 0.0
    calls.before_run(None)
    clock.now += 5.0
    calls.begin_making()  # It has run for long: this is another loss.
    assert calls.remade_since == clock.now
    for in_a_row in (1, 2):
        calls.before_run(None)
        clock.now += 1.0
        calls.begin_making(in_a_row)  # The replica replaced it: it was not lost.
        assert calls.remade_since == clock.now
    calls.before_run(None)
    calls.after_run()
    clock.now += 1.0
    calls.begin_making()
    assert calls.remade_since == clock.now


TWO = {"ps 0": "h:1", "ps 1": "h:2"}
REFUSES = f"ps 0 cannot be reached ({os.strerror(errno.ECONNREFUSED)})"
OTHER = {"ps 1": "ps 1 does not answer"}


@pytest.mark.parametrize(
    ("faults", "limit_s"),
    [({**SILENT, **OTHER}, 12.0), (SILENT, 5.0), ({"ps 0": REFUSES, **OTHER}, 5.0)],
    ids=["none answers", "some answer", "one refuses"],
)
def test_a_replica_that_may_be_cut_off_waits_longer_where_others_go_on(faults, limit_s):
    watch = Watch(faults, servers=TWO, patience_s=7.0, cross=lambda _: [])
    watch.at(0.0, limit_s - 0.1)
    with pytest.raises(
        ServerLostError, match="restart this one, and it joins them"
    ) as e:
        watch.at(limit_s)
    assert ("7 s more for a replica cut off" in str(e.value)) == (limit_s == 12.0)
    if limit_s == 12.0:
        assert Watch(faults, servers=TWO, patience_s=None).at(100.0) == 0.5


def test_a_call_has_as_long_to_go_on_when_the_network_is_back():
    faults = dict(SILENT)
    watch = Watch(faults, patience_s=20.0, unanswered=lambda: True)
    watch.at(0.0)
    faults.clear()  # TCP sends again what was lost, but not at once.
    watch.at(24.9)
    with pytest.raises(ServerLostError, match="the one that holds the global step"):
        watch.at(25.0)


def test_servers_that_do_not_reach_each_other_for_the_timeout_are_named():
    parted, asked = [], []

    def cross(servers):
        asked.append(watch.clock.now)
        return list(parted)

    watch = Watch({}, servers=TWO, cross=cross)
    watch.at(1.0, 2.5, 4.0, 5.0)
    parted.append("ps 0 (h:1) and ps 1 (h:2)")
    watch.at(6.0, 7.5, 9.9)
    says = r"cannot reach each other: ps 0 \(h:1\) and ps 1"
    with pytest.raises(ServerLostError, match=says) as raised:
        watch.at(10.0)
    assert asked == [2.5, 5.0, 7.5, 9.9, 10.0]
    (told,) = raised.value.servers
    assert told == "ps 0 (h:1) and ps 1 (h:2) cannot reach each other"


def test_an_error_whose_cause_is_that_servers_are_parted_says_so():
    late = ReplicaTimeoutError("late")
    parted = Watch({}, servers=TWO, cross=lambda _: ["one and other"]).monitor
    assert "cannot reach each other: one and other" in str(parted.explain(late))
    for watch in (
        Watch({}, servers=TWO, cross=lambda _: []),
        Watch({}, cross=pytest.fail),
    ):
        assert watch.monitor.explain(late) is late


def test_a_session_whose_call_was_left_behind_makes_no_other():
    forever, released = threading.Event(), []
    session = TrainingSession(
        lambda: SimpleNamespace(run=lambda *_: forever.wait(20)),
        servers={},
        wait_timeout_s=None,
        start_timeout_s=None,
        unanswered=lambda: False,
        failure=lambda: ServerLostError("gone"),
        release=released.append,
    )
    with pytest.raises(ServerLostError):
        session.run("loss")
    with pytest.raises(AbandonedError, match="did not return and was abandoned"):
        session.run("loss")
    assert released == [True]
    forever.set()


def test_servers_answer_and_reach_each_other_unless_one_says_nothing():
    from harness.replica_threads import local_cluster

    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
        assert "cannot be reached" in find_fault(address)
        assert find_faults({"ps 0": address})["ps 0"].startswith(f"ps 0 ({address}) ")
    assert find_faults({}) == {}
    one, other = local_cluster().addresses["ps"][:2]
    assert find_fault(one, timeout_s=5) is None
    assert find_parted({"ps 0": one, "ps 1": other}) == []
    with socket.create_server(("localhost", 0)) as silent:
        address = f"localhost:{silent.getsockname()[1]}"
        assert find_fault(address, timeout_s=0.1) == "does not answer within 0.1 s"
        assert find_parted({"ps 0": one, "ps 1": address}) == []

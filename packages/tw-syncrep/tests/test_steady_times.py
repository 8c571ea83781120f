"""Waits are as long as they are, whatever happens to the server's clock.

Private modules are imported because clocks of real servers cannot be set.
"""

import threading

import numpy as np
import pytest
import tensorflow as tf
from harness.processes import wait_until
from harness.replica_threads import new_container, run_replicas, start_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from syncrep_given import make, vector

from tw_syncrep import ReplicaTimeoutError
from tw_syncrep._protocol.run_table import RING, ReplicaField, RunField, RunTable
from tw_syncrep._timeouts.status import overdue_s, read_status
from tw_syncrep._timeouts.steady_times import SteadyTimes

HOUR_S = 3600
START_S = 1_000_000


class Server:
    """A run table whose clock is set, and what really happened."""

    def __init__(self):
        self.now_s, self.ahead_s = 0.0, 0.0
        self.heard_at = [0.0, 0.0]
        self.rows = np.zeros([len(ReplicaField) + 1, 2], np.int64)
        self.rows[ReplicaField.HEARD] = self.wall()
        self.ring = np.zeros(RING, np.int64)

    def wall(self):
        return int((START_S + self.now_s + self.ahead_s) * 1e6)

    def hear(self, replica):
        self.heard_at[replica] = self.now_s
        self.rows[ReplicaField.HEARD, replica] = self.wall()

    def parts(self):
        run = np.zeros(len(RunField) + 2, np.int64)
        run[-2] = self.wall()
        return [run, self.rows, self.ring]


# No sum of these is a number of tenths: a time written again to the microsecond, after
# tenths have passed and the clock was set back by as much, counts as not written.
SET_BY_S = [-3600.045677, -7.012345, 7.012345, 3600.045677]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(1, 50)),
        st.tuples(st.just("set"), st.sampled_from(SET_BY_S)),
        st.tuples(st.just("hear"), st.integers(0, 1)),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_a_silence_is_told_to_within_the_time_between_two_looks(events):
    server = Server()
    times = SteadyTimes(lambda: server.now_s)
    looked_at = 0.0
    assert read_status(times.restate(server.parts())).heard_s == (0.0, 0.0)
    for what, value in events:
        if what == "pass":
            server.now_s += value / 10
        elif what == "set":
            server.ahead_s += value
        else:
            server.hear(value)
        between_s, looked_at = server.now_s - looked_at, server.now_s
        told = read_status(times.restate(server.parts())).heard_s
        really = [server.now_s - at for at in server.heard_at]
        np.testing.assert_allclose(told, really, atol=between_s + 1e-5)


def test_in_an_ordinary_run_times_are_the_servers():
    server = Server()
    times = SteadyTimes(lambda: server.now_s)
    for replica in (0, 1, 0):
        server.now_s += 1.5
        server.hear(replica)
        server.now_s += 0.25
        restated, want = times.restate(server.parts()), server.parts()
        for got, part in zip(restated, want, strict=True):
            np.testing.assert_array_equal(got, part)


@pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
def test_a_reply_is_overdue_though_the_incarnation_began_by_another_clock(ahead_s):
    server = Server()
    times = SteadyTimes(lambda: server.now_s)
    server.rows[ReplicaField.ARRIVED_INCARNATION] = 5
    server.rows[ReplicaField.ARRIVED_AT] = server.wall()

    def overdue(begun_at):
        run, rows, ring = server.parts()
        run[[RunField.ROUND, RunField.INCARNATION, RunField.BEGUN_AT]] = 0, 6, begun_at
        restated = times.restate([run, rows, ring])
        return overdue_s(restated, np.array([0, 5]), 0, running_s=server.now_s + 1)

    overdue(server.wall())
    server.now_s, server.ahead_s = 1.0, ahead_s
    begun_at = server.wall()
    overdue(begun_at)
    server.now_s = 4.0
    assert overdue(begun_at) == pytest.approx(3.0)


@pytest.fixture
def set_clock(monkeypatch):
    """Sets the clock of all servers, which are in this process, by seconds."""
    ahead = [0.0]
    real = RunTable.now

    def now(self, *, above=()):
        by = tf.numpy_function(lambda: np.int64(ahead[0] * 1e6), [], tf.int64)
        time = real(self) + tf.ensure_shape(by, [])
        for number in above:
            time = tf.maximum(time, number + 1)
        return time

    monkeypatch.setattr(RunTable, "now", now)
    return lambda seconds: ahead.__setitem__(0, seconds)


def build(task):
    def grads(_):
        return [(tf.ones([3]), vector())]

    return make(task, grads, wait_timeout_s=4.0, start_timeout_s=40.0)


def drive_first(set_clock, ahead_s):
    """Drives two replicas; while the second is away the clock is set."""
    both_trained = threading.Barrier(2)
    goes_on = threading.Event()

    def drive(replica, model, session):
        session.run(model.train)
        both_trained.wait(40)
        if replica == 1:
            goes_on.wait(50)
            return None
        threading.Timer(1.0, set_clock, [ahead_s]).start()
        try:
            with pytest.raises(ReplicaTimeoutError) as raised:
                session.run(model.train)
        finally:
            goes_on.set()
        return [raised.value]

    return drive


@pytest.mark.slow
@pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
def test_a_wait_for_a_lost_replica_is_bounded_though_the_servers_clock_is_set(
    set_clock, ahead_s
):
    (error,), _ = run_replicas(2, build, drive_first(set_clock, ahead_s))
    assert error.missing == (1,)
    assert 4 <= error.waited_s < 30


@pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
def test_a_hold_begins_and_ends_though_the_servers_clock_is_set(set_clock, ahead_s):
    model, session = start_by_hand(0, build, container=new_container())
    ops = model.opt.sync_graph.ops
    session.run(ops.open)
    session.run(ops.release)  # of nothing; what is asked for later is held
    for seconds in (ahead_s, 0.0):
        asked = session.run(ops.next_hold)
        set_clock(seconds)
        hold = threading.Thread(target=session.run, args=(ops.hold,), daemon=True)
        hold.start()
        wait_until(lambda asked=asked: session.run(ops.held) >= asked)
        hold.join(0.3)
        assert hold.is_alive()
        set_clock(-seconds)
        session.run(ops.release)
        hold.join(20)
        assert not hold.is_alive()

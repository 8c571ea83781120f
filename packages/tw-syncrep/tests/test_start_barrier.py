"""How often a replica asks whether the others have started.

The private class is imported, as its clock must be a fake: waits take minutes.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from tw_core.internal import Recorder
from tw_syncrep import StartTimeoutError
from tw_syncrep._protocol.run_table import RING, ReplicaField, RunField
from tw_syncrep._timeouts.start_barrier import StartBarrier

OPS = SimpleNamespace(status="status", join="join", draw="draw", life="life")


class Cluster:
    """A run table, the clock and the session of replica 1, which has joined."""

    def __init__(self, *, replicas=2, opens_at=0.0, others_at=0.0):
        self.now = 0.0
        self.asked_at = []
        self.joined_at = [0.0]
        self.opens_at, self.others_at = opens_at, others_at
        graph = SimpleNamespace(
            replica=1,
            replicas=replicas,
            aggregate=replicas,
            uninitialized="uninitialized",
            position="position",
            session="session",
            ops=OPS,
        )
        self.barrier = StartBarrier(
            graph,
            self,
            events=Recorder("replica 1"),
            clock=self.clock,
            sleep=self.sleep,
        )
        self.barrier.incarnation = self.incarnation
        self.replicas = replicas

    @property
    def incarnation(self):
        return 5 if self.now >= self.opens_at else 0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds

    def run(self, fetches, feed=None):
        if fetches == "uninitialized":
            return []
        if fetches == "draw":
            return 3
        if fetches == "join":
            assert feed == {"life": 3}
            self.joined_at.append(self.now)
            return None
        if fetches == ["position", "session"]:
            return np.array([0, self.incarnation]), 1
        assert fetches == "status"
        self.asked_at.append(self.now)
        return self.parts()

    def parts(self):
        run = np.zeros(len(RunField) + 2, np.int64)
        run[RunField.INCARNATION] = self.incarnation
        rows = np.zeros([len(ReplicaField) + 1, self.replicas], np.int64)
        rows[ReplicaField.JOINED, 1] = 1
        if self.now >= self.others_at:
            rows[ReplicaField.JOINED] = 1
        return [run, rows, np.zeros(RING, np.int64)]

    def wait(self, timeout_s=None):
        """Waits at the barrier; returns when it was passed."""
        self.barrier.wait(self, timeout_s=timeout_s)
        assert self.barrier.is_passed
        return self.now


@pytest.mark.parametrize("others_at", [0.0, 0.01, 0.2, 1.0, 7.0, 60.0, 3600.0])
def test_a_start_is_noticed_later_by_an_eighth_at_most(others_at):
    late = Cluster(others_at=others_at).wait() - others_at
    assert 0 <= late <= max(0.05, others_at / 8)
    assert late <= 1


def test_a_replica_asks_20_times_a_second_at_first_and_then_once():
    cluster = Cluster(others_at=600.0)
    cluster.wait()
    pauses = np.diff(cluster.asked_at)
    np.testing.assert_allclose(pauses[:8], 0.05)
    assert (np.diff(pauses) >= -1e-9).all()
    assert pauses[-1] == pytest.approx(1.0)
    assert len(pauses) < 600 + 30


@pytest.mark.parametrize("replicas", [2, 100, 1000, 10_000])
def test_all_together_ask_100_times_a_second_at_most(replicas):
    cluster = Cluster(replicas=replicas, others_at=7200.0)
    cluster.wait()
    asked_at = np.array(cluster.asked_at)
    pauses = np.diff(asked_at[asked_at >= 3600])
    assert (replicas / pauses <= 100 + 1e-6).all()


@pytest.mark.parametrize("timeout_s", [0.03, 7.3, 100.0])
def test_the_wait_ends_at_its_timeout(timeout_s):
    cluster = Cluster(others_at=1e9)
    with pytest.raises(StartTimeoutError) as raised:
        cluster.wait(timeout_s)
    assert raised.value.waited_s == pytest.approx(timeout_s)


def test_a_replica_that_joins_again_looks_again_soon():
    cluster = Cluster(opens_at=30.0)
    passed_at = cluster.wait()
    first, again = cluster.joined_at
    assert first == 0 and 30 <= again <= 31
    assert passed_at == pytest.approx(again + 0.05)

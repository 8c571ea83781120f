"""Run after run over the same servers: what an ended run leaves on the servers."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from harness.processes import wait_until
from harness.replica_threads import new_container, run_replicas
from syncrep_given import ByHand, make, steps, vector

from tw_syncrep import StartTimeoutError

BOTH = (0, 1)


def build(task, **options):
    grad = tf.fill([3], 2.0 * task.replica_index + 1)
    return make(task, lambda _: [(grad, vector())], **options)


@pytest.mark.full("0")
@pytest.mark.parametrize("first", BOTH)
def test_a_later_run_waits_for_all_again(first):
    container = new_container()
    begins = threading.Event()

    def build_in_order(task):
        if task.index != first:
            assert begins.wait(30)
        return build(task)

    def drive(replica, model, session):
        begins.set()
        return steps(3)(replica, model, session)

    for order in (build, build_in_order):
        begins.clear()
        results = run_replicas(2, order, drive, container=container)
        for (step, (value,)), status in results:
            assert step == 3
            np.testing.assert_array_equal(value, [-6.0] * 3)
            assert status.dropped == 0


@pytest.mark.full
def test_a_replica_that_starts_after_the_end_is_refused():
    container = new_container()
    run_replicas(2, build, steps(1), container=container)

    def drive(replica, model, session):
        session.run(model.train)

    def late(task):
        return build(task, start_timeout_s=5)

    with pytest.raises(StartTimeoutError, match="has ended the run") as raised:
        run_replicas(2, late, drive, container=container, who=[1])
    assert (raised.value.arrived, raised.value.missing) == ((1,), (0,))


def test_a_replica_whose_run_ends_before_its_first_step_stops():
    def drive(replica, model, session):
        if replica == 0:
            wait_until(lambda: model.opt.status(session).joined == BOTH)
            return True
        wait_until(lambda: model.opt.status(session).is_closed)
        session.run(model.train)
        return session.should_stop()

    assert run_replicas(2, build, drive) == [True, True]


def test_marks_of_an_ended_run_do_not_count_in_the_next():
    replicas = ByHand(2, build)
    replicas.do("open", 0)
    replicas.do("join", 1)
    assert replicas.status().joined == BOTH
    replicas.do("close", 0)
    replicas.do("open", 0)
    assert replicas.status().joined == (0,)
    replicas.do("leave", 1)  # what it has left ended before
    assert replicas.status().left == ()
    replicas.do("join", 1)
    assert replicas.status().joined == BOTH
    replicas.do("leave", 1)
    status = replicas.status()
    assert (status.joined, status.left) == ((0,), (1,))


def test_a_replica_that_joins_between_two_runs_joins_the_next():
    replicas = ByHand(2, build)
    replicas.do("open", 0)
    replicas.do("close", 0)
    replicas.do("join", 1)
    assert replicas.status().joined == (0,)
    replicas.do("open", 0)
    assert replicas.status().joined == BOTH


def test_a_chief_that_restarts_finds_the_replicas_that_joined_and_left():
    replicas = ByHand(2, build)
    replicas.do("open", 0)
    replicas.do("join", 1)
    replicas.do("open", 0)
    assert replicas.status().joined == BOTH
    replicas.do("leave", 1)
    replicas.do("open", 0)
    assert replicas.status().left == (1,)


def test_a_replica_that_ends_all_late_does_not_end_the_next_run():
    replicas = ByHand(2, build)
    replicas.do("open", 0)
    replicas.do("join", 1)
    replicas.do("close", 0)
    replicas.do("open", 0)
    replicas.do("close", 1)
    assert not replicas.status().is_closed
    replicas.do("join", 1)
    replicas.do("close", 1)
    assert replicas.status().is_closed

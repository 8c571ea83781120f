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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_replica_whose_run_ends_before_its_first_step_stops():
    def drive(replica, model, session):
        if replica == 0:
            wait_until(lambda: model.opt.status(session).joined == BOTH)
            return True
        wait_until(lambda: model.opt.status(session).is_closed)
        session.run(model.train)
        return session.should_stop()

    assert run_replicas(2, build, drive) == [True, True]


@pytest.mark.slow
def test_who_joins_leaves_or_ends_does_so_in_a_single_run():
    replicas = ByHand(2, build)

    def after(*calls):
        for what, replica in calls:
            replicas.do(what, replica)
        return replicas.status()

    assert after(("open", 0), ("join", 1)).joined == BOTH
    assert after(("open", 0)).joined == BOTH  # by a chief that restarts
    assert after(("leave", 1), ("open", 0)).left == (1,)
    assert after(("close", 0), ("open", 0)).joined == (0,)
    assert after(("leave", 1)).left == ()  # what it has left ended before
    assert after(("join", 1)).joined == BOTH
    status = after(("leave", 1))
    assert (status.joined, status.left) == ((0,), (1,))
    # Between two runs it joins the next.
    assert after(("close", 0), ("join", 1)).joined == (0,)
    assert after(("open", 0)).joined == BOTH
    # It may end all late, which does not end the next run.
    assert not after(("close", 0), ("open", 0), ("close", 1)).is_closed
    assert after(("join", 1), ("close", 1)).is_closed

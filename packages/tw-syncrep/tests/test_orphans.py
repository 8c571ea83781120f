"""Calls of a session that is gone, whose cancellation TensorFlow has dropped.

They are made by hand here: a call in a session that nobody closes is one.
"""

import contextlib
import logging
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import new_container, run_replicas, start_by_hand
from syncrep_given import make, vector

STEPS = 4


def build(task):
    grad = tf.fill([3], 2.0 * task.replica_index + 1)
    return make(task, lambda _: [(grad, vector())], wait_timeout_s=16)


def leave_behind(session, fetches, feed=None):
    """Starts a call that nobody waits for, and gives it time to wait on the server."""

    def run():
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            session.run(fetches, feed)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive(), "the call does not wait"
    return thread


def train(replica, model, session):
    del replica
    # A batch of a replica that joined before the chief opened the run is none.
    while session.run(model.step) < STEPS:
        session.run(model.train)
    return int(session.run(model.step)), session.run(model.values)


def check(results):
    for step, (value,) in results:
        assert step == STEPS
        np.testing.assert_array_equal(value, [-2.0 * STEPS] * 3)


@pytest.mark.slow
def test_a_round_that_was_left_behind_takes_nothing_from_the_next_run(caplog):
    caplog.set_level(logging.WARNING, "tw_syncrep")
    container = new_container()
    model, session = start_by_hand(0, build, container=container)
    graph = model.opt.sync_graph
    session.run(graph.ops.open)
    incarnation = session.run(graph.position)[1]
    orphan = leave_behind(session, graph.round_op, {graph.incarnation: incarnation})
    check(run_replicas(2, build, train, container=container))
    orphan.join(10)
    assert not orphan.is_alive(), "the round goes on"
    assert not caplog.records


@pytest.mark.slow
def test_a_wait_that_was_left_behind_takes_no_token_from_the_next_session(caplog):
    caplog.set_level(logging.WARNING, "tw_syncrep")
    container = new_container()
    opened, has_joined = threading.Event(), threading.Event()
    orphans = []

    def build_after(task):
        if task.replica_index == 1:
            assert opened.wait(30)
            model, session = start_by_hand(1, build, container=container)
            session.run(model.opt.sync_graph.ops.join)
            orphans.append(leave_behind(session, model.train))
        return build(task)

    def drive(replica, model, session):
        if replica == 0:
            opened.set()
            assert has_joined.wait(30)
            time.sleep(1.0)  # The other waits for the end of the round by then.
        has_joined.set()
        return train(replica, model, session)

    check(run_replicas(2, build_after, drive, container=container))
    orphans[0].join(10)
    assert not orphans[0].is_alive(), "the wait goes on"
    assert not caplog.records


class FailsOnce(tf.compat.v1.train.SessionRunHook):
    """A user's hook, for which TensorFlow makes the session again, and closes none."""

    def __init__(self):
        self.sessions = []

    def after_create_session(self, session, coord):
        del coord
        self.sessions.append(session)
        if len(self.sessions) == 1:
            raise tf.errors.AbortedError(None, None, "once")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
def test_a_session_that_is_made_again_for_a_users_hook_goes_on(victim):
    hooks = []

    def build_failing(task):
        model = build(task)
        if task.replica_index == victim:
            hooks.append(FailsOnce())
            model.hooks.append(hooks[0])
        return model

    check(run_replicas(2, build_failing, train))
    assert len(hooks[0].sessions) == 2

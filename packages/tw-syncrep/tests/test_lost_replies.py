"""A replica that never learns of the end of its step continues in a new session."""

import contextlib
import logging
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from harness.processes import wait_until
from harness.replica_threads import local_cluster, run_replicas
from syncrep_given import make, vector

from tw_syncrep import SyncTimeoutError

v1 = tf.compat.v1
BATCHES = [1.0, 10.0, 100.0]


def build(task, *, wait_timeout_s=10, **options):
    options = {"wait_timeout_s": wait_timeout_s, "start_timeout_s": 50, **options}
    fed = v1.placeholder_with_default(1.0, [])
    model = make(task, lambda _: [(tf.fill([3], fed), vector())], **options)
    model.fed = fed
    with tf.device(model.step.device):
        queue = tf.queue.FIFOQueue(
            -1, [tf.int64], [[3]], shared_name=f"sync_replicas/tokens_{task.index}"
        )
    model.take, model.size = queue.dequeue(), queue.size()
    return model


class Thief:
    """Takes the next tokens of a replica, and so the end of its next wait."""

    def __init__(self, replica, model, *, tokens):
        self._session = v1.Session(
            local_cluster().target("worker", replica), graph=model.step.graph
        )
        self._model = model
        self._threads = [
            threading.Thread(target=self._take, daemon=True) for _ in range(tokens)
        ]
        self._taken = []

    def __enter__(self):
        while self._session.run(self._model.size):
            self._session.run(self._model.take)
        for thread in self._threads:
            thread.start()
        time.sleep(1.0)  # No one can ask a queue who waits for it.

    def __exit__(self, *_):
        self._session.close()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        assert self._taken, "nothing was taken"

    def _take(self):
        with contextlib.suppress(tf.errors.CancelledError, RuntimeError):
            self._taken.append(self._session.run(self._model.take))


ALL = 6
"""As many tokens as there can be before a session is replaced, and more."""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
@pytest.mark.parametrize("tokens", [1, ALL], ids=["one", "all"])
def test_a_batch_counts_once_and_no_step_is_lost(victim, tokens, caplog):
    """Without a folder for checkpoints: what the servers hold is not initialized."""
    caplog.set_level(logging.WARNING, "tw_syncrep")

    def drive(replica, model, session):
        for batch in BATCHES:
            feed = {model.fed: batch}
            if batch == BATCHES[1] and replica == victim:
                with Thief(replica, model, tokens=tokens):
                    session.run(model.train, feed)
                continue
            if batch == BATCHES[1]:
                wait_until(lambda: victim in model.opt.status(session).arrived)
            session.run(model.train, feed)
        if replica == 0:
            return int(session.run(model.step)), session.run(model.values)
        return None

    step, (value,) = run_replicas(2, build, drive)[0]
    assert step == len(BATCHES)
    np.testing.assert_array_equal(value, [-sum(BATCHES)] * 3)
    replaced = replacements(caplog)
    assert len(replaced) == (tokens == ALL), "one wake-up is enough for one token"
    told = f"replica {victim} did not learn of the end of round"
    assert all(told in warning for warning in replaced)


@pytest.mark.slow
def test_a_pull_that_is_too_slow_for_every_session_ends_with_an_error(
    caplog, monkeypatch
):
    caplog.set_level(logging.WARNING, "tw_syncrep")
    pulls = []

    def pull_slowly(pulling, progress, *, is_published):
        arrived = tf.identity(progress)
        if arrived.device.endswith("task:0"):
            return arrived, tf.no_op()
        with tf.control_dependencies([arrived]):
            waited = v1.py_func(lambda: pulls.append(time.sleep(2.5)), [], [])
        return arrived, tf.group(waited)

    def build_slow(task):
        # The other is patient, or it would end the run first.
        return build(task, wait_timeout_s=4 if task.replica_index else 50)

    def drive(replica, model, session):
        if replica == 0:
            for _ in range(3):
                session.run(model.train)
            return
        for _ in range(3):  # A batch that has counted has nothing to wait for.
            session.run(model.train)

    monkeypatch.setattr("tw_syncrep._protocol.replica.Pulling.pull", pull_slowly)
    with pytest.raises(SyncTimeoutError, match="did not help 2 times in a row"):
        run_replicas(2, build_slow, drive)
    assert len(replacements(caplog)) == 3
    assert len(pulls) >= 3


def replacements(caplog):
    messages = [r.getMessage() for r in caplog.records if r.name == "tw_syncrep"]
    return [message for message in messages if "replacing its session" in message]

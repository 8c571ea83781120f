"""A replica that never learns of the end of its step continues in a new session."""

import logging
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from syncrep_given import make, vector
from syncrep_threads import local_cluster, run_replicas

v1 = tf.compat.v1
STEPS = 4


def build(task):
    grad = tf.fill([3], 2.0 * task.replica_index + 1)
    model = make(task, lambda _: [(grad, vector())], wait_timeout_s=16)
    with tf.device(model.step.device):
        queue = tf.queue.FIFOQueue(
            -1, [tf.int64], [[3]], shared_name=f"sync_replicas/tokens_{task.index}"
        )
    model.take, model.size = queue.dequeue(), queue.size()
    return model


class Thief:
    """Takes the next token of a replica, and so the end of its next wait."""

    def __init__(self, replica, model):
        self._target = local_cluster().target("worker", replica)
        self._model = model
        self._thread = threading.Thread(target=self._take, daemon=True)
        self.is_waiting = threading.Event()

    def __enter__(self):
        self._thread.start()
        assert self.is_waiting.wait(30)
        time.sleep(1.0)  # No one can ask a queue who waits for it.

    def __exit__(self, *_):
        self._thread.join(30)
        assert not self._thread.is_alive(), "nothing was taken"

    def _take(self):
        with v1.Session(self._target, graph=self._model.step.graph) as session:
            while session.run(self._model.size):
                session.run(self._model.take)
            self.is_waiting.set()
            session.run(self._model.take)


@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
def test_it_continues_before_the_others_give_it_up(victim, caplog, tmp_path):
    caplog.set_level(logging.WARNING, "tw_syncrep")

    def drive(replica, model, session):
        session.run(model.train)
        if replica == victim:
            with Thief(replica, model):
                session.run(model.train)
        else:  # The last to arrive may see the round's end without reading a token.
            wait_for_arrival(model.opt, session)
        at = int(session.run(model.step))
        while at < STEPS:
            session.run(model.train)
            at = int(session.run(model.step))
        return at, session.run(model.values)

    def wait_for_arrival(opt, session):
        deadline = time.monotonic() + 30
        while victim not in opt.status(session).arrived:
            assert time.monotonic() < deadline, f"replica {victim} has not arrived"
            time.sleep(0.05)

    for step, (value,) in run_replicas(2, build, drive, folder=tmp_path):
        assert step == STEPS
        np.testing.assert_array_equal(value, [-2.0 * STEPS] * 3)
    (warning,) = [r for r in caplog.records if r.name == "tw_syncrep"]
    assert f"replica {victim} did not learn of the end of round" in warning.message

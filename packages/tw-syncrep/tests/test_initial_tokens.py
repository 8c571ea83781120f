"""With initial tokens, what counts and what is wasted is what TensorFlow's class has.

Three replicas of which one is a backup take their steps one after the other: nobody has
to wait while the initial tokens last.

A private class is imported to make one replica slow where no public call is.
"""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from harness.processes import wait_until
from harness.replica_threads import run_replicas
from syncrep_given import make, vector

from tw_syncrep._protocol.queues import WakeQueues

# Replicas 0 and 2 make the first step. All that is brought to it later is wasted:
# replica 1's first gradient, and the second one of each, as their tokens say step 0.
TURNS = (0, 2, 1, 1, 0, 2)


def trace(make_cluster, kind):
    """Runs the turns, then one step together; what the backup sees after each."""
    tasks = make_cluster(workers=3)
    options = {"wait_timeout_s": 50} if kind == "towers" else {}
    tasks.train(
        {"kind": kind, "aggregate": 2, "total": 3, "num_tokens": 3, "options": options}
    )
    values = [{"factor": 1.0 + 2 * replica} for replica in range(3)]
    backup = tasks.workers[1]
    seen = []
    for turn, replica in enumerate(TURNS):
        tasks.step_together(values, [replica])
        if turn == 1:  # The chief applies it in a thread of its own.
            wait_until(lambda: backup.ask("read")[0] == 1)
        seen.append((backup.ask("read"), [w.ask("local") for w in tasks.workers]))
    tasks.step_together(values, [0, 1])
    wait_until(lambda: backup.ask("read")[0] == 2)
    seen.append((backup.ask("read"), [w.ask("local") for w in tasks.workers]))
    tasks.kill()
    return seen


@pytest.mark.slow
def test_three_replicas_with_a_backup_have_tensorflows_steps(make_cluster):
    want = trace(make_cluster, "tensorflow")
    got = trace(make_cluster, "towers")
    for turn, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        (step, values), local_steps = ours
        (their_step, their_values), their_local_steps = theirs
        assert step == their_step, turn
        assert local_steps == their_local_steps, turn
        for name, value in their_values.items():
            np.testing.assert_array_equal(values[name], value, f"{name}, turn {turn}")


@pytest.fixture
def slow_to_read(monkeypatch):
    """Has replica 2 read the run table only when its round is over."""
    wait = WakeQueues.wait

    def wait_late(self, replica, ticket, *args, **settings):
        if replica != 2:
            return wait(self, replica, ticket, *args, **settings)
        with tf.device(self.table.device):
            late = tf.numpy_function(
                lambda x: (time.sleep(0.3), x)[1], [ticket], tf.int64
            )
            with tf.control_dependencies([late]):
                late = tf.ensure_shape(late, ticket.shape)
                return wait(self, replica, late, *args, **settings)

    monkeypatch.setattr(WakeQueues, "wait", wait_late)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_to_read")
def test_reading_the_run_table_late_does_not_spare_a_replica_its_initial_token():
    turns = iter([*TURNS, None])
    now = SimpleNamespace(turn=next(turns))
    has_begun = threading.Event()

    def build(task):
        # A replica that joins after the first step continues with the second.
        assert task.is_chief or has_begun.wait(60)
        return make(
            task,
            lambda replica: [(tf.fill([3], 1.0 + replica), vector())],
            total_num_replicas=3,
            tokens=3,
        )

    def drive(replica, model, session):
        has_begun.set()
        wait_until(lambda: model.opt.status(session).joined == (0, 1, 2))
        for _ in range(2):
            wait_until(lambda: now.turn == replica)
            session.run(model.train)
            if replica == 2:
                wait_until(lambda: session.run(model.step) == 1)
            now.turn = next(turns)
        wait_until(lambda: now.turn is None)
        return session.run([model.step, model.values]), model.opt.status(session)

    (step, values), status = run_replicas(3, build, drive)[1]
    assert step == 1
    np.testing.assert_array_equal(values[0], [-2.0] * 3)
    assert status.arrived == ()

"""Which replicas' gradients make a step: one per slot, the same for all variables."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from harness.processes import wait_until
from harness.replica_threads import run_replicas
from syncrep_given import ByHand, make, vector


def test_a_batch_that_is_pushed_again_counts_once():
    def build(task):
        pushed = tf.compat.v1.placeholder_with_default(1.0, [])
        grads = [(tf.fill([3], pushed), vector())]
        model = make(task, lambda _: grads, aggregate=2, total_num_replicas=1)
        model.pushed = pushed
        return model

    alone = ByHand(1, build)
    alone.do("open", 0)
    [model], [session], graph = alone.models, alone.sessions, alone.graph(0)

    def begin(op, feed=None):
        call = threading.Thread(target=session.run, args=(op, feed), daemon=True)
        call.start()
        return call

    stamp = alone.session(0) + 1  # Stamps grow from the session's number.
    again = {graph.stamp: stamp, model.pushed: 1.0}
    session.run(model.train, again)  # The first of two does not wait.
    alone.do("join", 0)  # Its session is replaced, which it does not know of.
    calls = [begin(graph.round_op), begin(model.train, again)]
    wait_until(lambda: alone.status().arrived == (0,))
    calls.append(begin(model.train, {graph.stamp: stamp + 1, model.pushed: 3.0}))
    calls[0].join(20)
    np.testing.assert_array_equal(session.run(model.values), [[-2.0] * 3])
    alone.do("wake", 0)  # Two calls have waited, for one token.
    for call in calls:
        call.join(20)
        assert not call.is_alive()


@pytest.mark.slow
def test_one_replica_fills_one_slot_even_with_initial_tokens():
    def grads(r):
        return [(tf.fill([3], 2.0 * r), vector())]

    def drive(replica, model, session):
        while session.run(model.step) < 3:
            session.run(model.train)
        return session.run([model.step, model.values])

    def build(task):
        return make(task, grads, tokens=2)

    (step, values), _ = run_replicas(2, build, drive)
    assert step == 3
    np.testing.assert_array_equal(values[0], [-3.0] * 3)


@pytest.mark.slow
def test_with_backups_all_variables_of_a_step_come_from_the_same_replicas():
    # The digits of the sum tell how many gradients of each replica it holds.
    until, together = 30, threading.Barrier(3)
    devices = set()

    def grads(replica):
        variables = [vector(f"v{n}") for n in range(4)]
        devices.update(v.device for v in variables)
        return [(tf.fill([3], 2.0 * 100.0**replica), v) for v in variables]

    def drive(replica, model, session):
        while session.run(model.step) < until:
            session.run(model.train)
        together.wait(30)
        values = session.run(model.values)
        together.wait(30)
        return values

    def build(task):
        return make(task, grads, total_num_replicas=3)

    values = run_replicas(3, build, drive)[0]
    assert len(devices) == 2
    total = int(-values[0][0])
    counts = [total // 100**replica % 100 for replica in range(3)]
    assert sum(counts) == 2 * until
    assert max(counts) <= until
    for value in values:
        np.testing.assert_array_equal(value, [-total] * 3)

"""What a worker pulls: one state of each server, whoever changes it meanwhile.

A private enum is imported: users get no ``WakeReason``, the hook does.
"""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from harness.processes import wait_until
from harness.replica_threads import new_container, run_replicas, start_by_hand
from syncrep_given import make, vector

import tw_syncrep
from tw_syncrep._protocol.queues import WakeReason

v1 = tf.compat.v1


def build(task, **options):
    """A model with copies, on two servers, whose steps take 1 from all parameters."""

    def grads(_):
        with tw_syncrep.pulled_together(task):
            for n in range(4):
                vector(f"v{n}")
        masters = v1.trainable_variables()
        assert len({master.device for master in masters}) == 2
        return [(tf.ones([3]), master) for master in masters]

    model = make(task, grads, **options)
    copies = [cached.copy for cached in tw_syncrep.cached_parameters()]
    assign = [
        [master.assign(tf.fill([3], value)).op for master in model.values]
        for value in (0.0, 10.0, 20.0)
    ]
    return SimpleNamespace(
        assign=assign,
        opt=model.opt,
        train=model.train,
        hooks=model.hooks,
        copies=copies,
    )


class HaltsHalfway:
    """Subtracts the first gradient, and the second when it gets a token."""

    def compute_gradients(self, loss, var_list=None):
        raise NotImplementedError

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        (first, a), (second, b) = grads_and_vars
        with tf.control_dependencies([a.assign_sub(first)]):
            taken = gate(global_step.device).dequeue()
        with tf.control_dependencies([taken]):
            changed = b.assign_sub(second)
        with tf.control_dependencies([changed]):
            return global_step.assign_add(1, read_value=False)


def gate(server):
    with tf.device(server):
        return tf.queue.FIFOQueue(-1, [tf.int32], [[]], shared_name="gate")


@pytest.mark.slow
def test_a_slow_replica_pulls_the_state_after_a_round_while_the_next_changes_it():
    container = new_container()

    def build_halting(task):
        def grads(_):
            with tw_syncrep.pulled_together(task), tf.device("/job:ps/task:0"):
                vector("a"), vector("b")
            return [(tf.ones([3]), master) for master in v1.trainable_variables()]

        model = make(task, grads, inner=HaltsHalfway(), total_num_replicas=3)
        model.copies = [cached.copy for cached in tw_syncrep.cached_parameters()]
        with tf.control_dependencies(None):
            model.let_go_on = gate("/job:ps/task:0").enqueue(0)
        return model

    made = [start_by_hand(r, build_halting, container=container) for r in range(3)]
    models, sessions = zip(*made, strict=True)
    graphs = [model.opt.sync_graph for model in models]
    for replica, graph in enumerate(graphs):
        sessions[replica].run(graph.ops.join if replica else graph.ops.open)

    def begin_round():
        calls = [(0, graphs[0].round_op), (0, models[0].train), (1, models[1].train)]
        threads = [
            threading.Thread(target=sessions[replica].run, args=[op], daemon=True)
            for replica, op in calls
        ]
        for thread in threads:
            thread.start()
        return threads

    def end_round(threads):
        sessions[0].run(models[0].let_go_on)
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a round hangs"

    end_round(begin_round())
    threads = begin_round()
    a, b = models[2].values
    wait_until(lambda: sessions[2].run(a)[0] == -2)
    sessions[2].run(models[2].train)  # for the first round: comes too late
    np.testing.assert_array_equal(sessions[2].run(b), [-1.0] * 3)
    np.testing.assert_array_equal(sessions[2].run(models[2].copies), [[-1.0] * 3] * 2)
    end_round(threads)
    np.testing.assert_array_equal(sessions[0].run(models[0].copies), [[-2.0] * 3] * 2)


@pytest.mark.slow
def test_what_is_assigned_by_hand_is_pulled_at_the_end_of_the_next_round():
    barrier = threading.Barrier(2, timeout=30)

    def drive(replica, model, session):
        session.run(model.train)
        barrier.wait()
        if replica == 0:
            session.run(model.assign[1])
        barrier.wait()
        session.run(model.train)
        return session.run(model.copies)

    for copies in run_replicas(2, build, drive):
        np.testing.assert_array_equal(copies, [[9.0] * 3] * 4)


@pytest.fixture
def by_hand():
    def build_alone(task):
        return build(task, aggregate=1)

    return start_by_hand(0, build_alone, container=new_container())


def test_before_a_chief_has_begun_parameters_are_read_where_they_are(by_hand):
    model, session = by_hand
    graph = model.opt.sync_graph
    session.run(model.assign[1])
    session.run(graph.ops.join)
    np.testing.assert_array_equal(session.run(model.copies), [[10.0] * 3] * 4)
    session.run(model.assign[2])
    session.run(graph.ops.wake)
    reply = session.run(graph.reply)
    assert reply[-1] == WakeReason.WATCHDOG
    np.testing.assert_array_equal(session.run(model.copies), [[20.0] * 3] * 4)


def test_what_is_published_is_no_variable_of_the_model(by_hand):
    model, session = by_hand
    with session.graph.as_default():
        names = [variable.op.name for variable in v1.global_variables()]
    assert sorted(names) == ["global_step", "v0", "v1", "v2", "v3"]
    assert list(session.run(model.opt.ready_for_local_init_op)) == []

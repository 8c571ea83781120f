"""Sessions without the hook, driven by hand as TensorFlow's class lets one."""

import threading

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import local_cluster

import tw_syncrep
from tw_syncrep import SyncReplicasOptimizer

v1 = tf.compat.v1
CONTAINER = "queue-runner"


def make(replica):
    """A session and ops of one replica; the chief's variables are initialized."""
    local = local_cluster()
    task = local.task("worker", replica)
    with tf.Graph().as_default() as graph, graph.container(CONTAINER):
        with v1.device(tw_syncrep.device_setter(task)):
            v = v1.get_variable("v", [2], initializer=v1.zeros_initializer())
            step = v1.train.get_or_create_global_step()
            opt = SyncReplicasOptimizer(v1.train.GradientDescentOptimizer(1.0), 2)
            grads = [(tf.fill([2], 2.0 * replica), v)]
            train = opt.apply_gradients(grads, global_step=step)
        runner, tokens = opt.get_chief_queue_runner(), opt.get_init_tokens_op(0)
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        session = v1.Session(local.target("worker", replica), graph=graph)
        session.run(init if replica == 0 else init[1])
        assert session.run(opt.ready_for_local_init_op).size == 0
        session.run(opt.chief_init_op if replica == 0 else opt.local_step_init_op)
        session.run(tokens)
    return session, opt, runner, train, v, step


@pytest.mark.timeout(90)
def test_the_queue_runner_runs_the_rounds_and_its_end_ends_the_waits():
    chief, other = make(0), make(1)
    coord = tf.train.Coordinator()
    threads = chief[2].create_threads(chief[0], coord=coord, daemon=True, start=True)

    def steps(session, train, count):
        for _ in range(count):
            session.run(train)

    other_steps = threading.Thread(
        target=steps, args=(other[0], other[3], 3), daemon=True
    )
    other_steps.start()
    steps(chief[0], chief[3], 3)
    other_steps.join(30)
    values, step = other[0].run([other[4], other[5]])
    np.testing.assert_array_equal(values, [-3.0, -3.0])
    assert step == 3
    assert chief[1].get_chief_queue_runner() is chief[2]

    ended = []

    def wait_alone():
        try:
            other[0].run(other[3])
        except tf.errors.OutOfRangeError as error:
            ended.append(error)

    alone = threading.Thread(target=wait_alone, daemon=True)
    alone.start()
    coord.request_stop()
    coord.join(threads, stop_grace_period_secs=20)
    alone.join(30)
    assert not alone.is_alive()
    assert len(ended) == 1

"""What runs around a step: a second optimizer, updates, averages, the status."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import run_replicas
from syncrep_given import make, sgd, steps, vector

from tw_core.flat_variables import FlatVariables, pack_gradients
from tw_syncrep import SyncReplicasOptimizer

v1 = tf.compat.v1


@pytest.mark.slow
def test_two_optimizers_live_in_one_graph_and_one_run():
    def build(task):
        step = v1.train.get_or_create_global_step()
        first, second = vector("first"), vector("second")
        trains, hooks = [], []
        for number, variable in enumerate([first, second], start=1):
            opt = SyncReplicasOptimizer(sgd(), 2, wait_timeout_s=30)
            grads = [(tf.fill([3], 1.0 * number), variable)]
            trains.append(opt.apply_gradients(grads, global_step=step))
            hooks.append(opt.make_session_run_hook(task.is_chief))
        values = [first, second]
        return SimpleNamespace(trains=trains, hooks=hooks, step=step, values=values)

    def drive(replica, model, session):
        for _ in range(3):
            session.run(model.trains)
        return session.run([model.step, model.values])

    (step, values), _ = run_replicas(2, build, drive)
    assert step == 6
    np.testing.assert_array_equal(values, [[-3.0] * 3, [-6.0] * 3])


@pytest.mark.slow
def test_what_the_training_op_waits_for_runs_once_per_step_and_replica():
    def build(task):
        local = [v1.GraphKeys.LOCAL_VARIABLES]
        with tf.device(f"/job:worker/task:{task.index}"):
            updates = v1.get_variable(
                "updates", [], initializer=v1.zeros_initializer(), collections=local
            )
        with tf.control_dependencies([v1.assign_add(updates, 1.0)]):
            model = make(task, lambda r: [(tf.ones([3]), vector())])
        model.values = [updates]
        return model

    for (_, values), _ in run_replicas(2, build, steps(3)):
        assert values == [3.0]


@pytest.mark.slow
def test_moving_averages_are_taken_once_per_step():
    average = tf.train.ExponentialMovingAverage(0.5)

    def build(task):
        v = vector()
        averaged = {"variable_averages": average, "variables_to_average": [v]}
        model = make(task, lambda r: [(tf.ones([3]), v)], **averaged)
        model.values = [next(x for x in v1.global_variables() if "Moving" in x.name)]
        return model

    ((_, values), _), _ = run_replicas(2, build, steps(2))
    # 0 at first; then half of -1; then half of that and half of -2.
    np.testing.assert_array_equal(values[0], [-1.25] * 3)


@pytest.mark.slow
def test_a_replica_has_arrived_with_the_last_of_its_gradients():
    has_read = threading.Event()

    def drive(replica, model, session):
        if replica == 1:
            assert has_read.wait(30)
            session.run(model.train)
            return None
        session.run(model.train)  # the first of two
        status = model.opt.status(session)
        has_read.set()
        session.run(model.train)
        values = session.run(model.values)
        return status.arrived, status.missing, model.opt.status(session).step, values

    def build(task):
        given = {"aggregate": 3, "total_num_replicas": 2}
        return make(task, lambda r: [(tf.fill([3], 3.0 * r), vector())], **given)

    (*seen, (value,)), _ = run_replicas(2, build, drive)
    assert seen == [(), (0, 1), 1]
    np.testing.assert_array_equal(value, [-1.0] * 3)  # two of 0 and one of 3


def test_a_step_that_fails_on_the_server_is_raised_by_the_chief():
    class Failing(v1.train.GradientDescentOptimizer):
        def apply_gradients(self, pairs, global_step=None, name=None):
            bad = tf.debugging.check_numerics(pairs[0][0], "not a number")
            return super().apply_gradients([(bad, pairs[0][1])], global_step)

    def drive(replica, model, session):
        if replica == 0:
            with pytest.raises(tf.errors.InvalidArgumentError, match="not a number"):
                session.run(model.train)
        return None

    def grads(r):
        return [(tf.fill([3], np.nan), vector())]

    run_replicas(
        1, lambda task: make(task, grads, inner=Failing(1.0), aggregate=1), drive
    )


def test_flat_variables_need_an_elementwise_optimizer():
    class Own(v1.train.GradientDescentOptimizer):
        pass

    def apply(inner):
        with tf.Graph().as_default():
            v1.train.get_or_create_global_step()
            with FlatVariables().scope():
                variable = vector()
            pairs = pack_gradients([(tf.ones([3]), variable)])
            SyncReplicasOptimizer(inner, 1, replica_index=0).apply_gradients(pairs)

    with pytest.raises(ValueError, match="Own is not known to update each element"):
        apply(Own(1.0))
    apply(v1.train.GradientDescentOptimizer(1.0))


@pytest.mark.slow
def test_a_step_function_trains_as_a_run_does():
    def drive(replica, model, session):
        session.run_step_fn(
            lambda step_context: step_context.run_with_hooks(model.train)
        )
        assert session.graph is v1.get_default_graph()
        return session.run([model.step, model.values])

    def grads(r):
        return [(tf.fill([3], 2.0 * r), vector())]

    for step, values in run_replicas(2, lambda task: make(task, grads), drive):
        assert step == 1
        np.testing.assert_array_equal(values[0], [-1.0] * 3)

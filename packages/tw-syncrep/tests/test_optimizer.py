"""What the optimizer computes, on replicas that are threads of one process."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from syncrep_threads import run_replicas

from tw_syncrep import SyncReplicasOptimizer, cluster

v1 = tf.compat.v1


def sgd(rate=1.0):
    return v1.train.GradientDescentOptimizer(rate)


def vector(name="v", size=3, value=0.0, **settings):
    start = v1.constant_initializer(value)
    return v1.get_variable(name, [size], initializer=start, **settings)


def make(task, grads_of, *, inner=None, aggregate=2, tokens=-1, **options):
    """A model whose gradients are given; one variable a gradient."""
    step = v1.train.get_or_create_global_step()
    pairs = grads_of(task.replica_index)
    opt = SyncReplicasOptimizer(inner or sgd(), aggregate, wait_timeout_s=30, **options)
    train = opt.apply_gradients(pairs, global_step=step)
    hook = opt.make_session_run_hook(task.is_chief, tokens)
    values = [v for v in v1.trainable_variables()]
    return SimpleNamespace(opt=opt, train=train, hooks=[hook], step=step, values=values)


def steps(count):
    def drive(replica, model, session):
        for _ in range(count):
            session.run(model.train)
        return session.run([model.step, model.values]), model.opt.status(session)

    return drive


def run(grads_of, *, count=1, replicas=2, **options):
    """Returns the global step, the values and the status after some steps."""
    results = run_replicas(
        replicas, lambda task: make(task, grads_of, **options), steps(count)
    )
    (step, values), status = results[0]
    return int(step), values, status


def test_a_step_applies_the_mean_of_the_replicas_gradients():
    def grads(r):
        return [(tf.fill([3], 2.0 * r + 1), vector())]

    step, values, status = run(grads, count=4)
    assert step == 4
    np.testing.assert_array_equal(values[0], [-8.0] * 3)
    assert status.dropped == 0


def test_no_first_step_is_wasted():
    def grads(r):
        return [(tf.fill([3], 1.0), vector())]

    step, values, _ = run(grads, count=1)
    assert step == 1
    np.testing.assert_array_equal(values[0], [-1.0] * 3)


def test_gradients_of_many_sizes_servers_and_dtypes_arrive_where_they_belong():
    def grads(replica):
        pairs = []
        for n in range(7):
            dtype = tf.float64 if n % 3 == 2 else tf.float32
            v = v1.get_variable(
                f"v{n}", [n + 1], dtype, initializer=v1.zeros_initializer()
            )
            grad = tf.cast(tf.range(n + 1) + 10 * n + 2 * replica, dtype)
            pairs.append((grad, v))
        return pairs

    for below in (0, 16, 1 << 20):
        _, values, _ = run(grads, fuse_below=below)
        for n, value in enumerate(values):
            np.testing.assert_array_equal(value, -(np.arange(n + 1) + 10 * n + 1))


def test_an_unused_variable_passes_to_the_inner_optimizer_as_none():
    def grads(r):
        return [(None, vector("unused")), (tf.ones([3]), vector())]

    _, values, _ = run(grads)
    np.testing.assert_array_equal(values, [[0.0] * 3, [-1.0] * 3])


def rows(replica):
    """Replica 0 touches rows 0 and 1, replica 1 rows 1 and 1 again."""
    table = v1.get_variable("table", [4, 2], initializer=v1.zeros_initializer())
    indices = [[0, 1], [1, 1]][replica]
    values = tf.constant([[2.0, 2.0], [4.0, 4.0]])
    return [
        (tf.IndexedSlices(values, tf.constant(indices), tf.constant([4, 2])), table)
    ]


def test_sparse_means_divide_by_the_replicas_as_dense_ones_do():
    _, values, _ = run(rows)
    np.testing.assert_array_equal(values[0][:, 0], [-1.0, -5.0, 0.0, 0.0])


def test_sparse_means_by_row_divide_by_the_replicas_that_touched_a_row():
    def apart(r):
        return [
            (
                tf.IndexedSlices(
                    tf.fill([2, 2], 2.0), tf.constant([0, r + 1]), tf.constant([4, 2])
                ),
                v1.get_variable("table", [4, 2], initializer=v1.zeros_initializer()),
            )
        ]

    _, values, _ = run(apart, sparse_mean="per_row", count=2)
    np.testing.assert_array_equal(values[0][:, 0], [-4.0, -4.0, -4.0, 0.0])


def test_compression_rounds_what_is_pushed_and_nothing_else():
    def grads(r):
        return [(tf.fill([3], 1.0 + 2.0**-12), vector(value=2.0**-10))]

    _, values, _ = run(grads, compression=tf.bfloat16)
    np.testing.assert_array_equal(values[0], [2.0**-10 - 1] * 3)
    _, values, _ = run(grads)
    np.testing.assert_array_equal(values[0], [2.0**-10 - 1 - 2.0**-12] * 3)


def test_fewer_replicas_than_gradients_bring_several_each():
    # Replica 0 fills two of three slots.
    def grads(r):
        return [(tf.fill([3], 3.0 * (r + 1)), vector())]

    def drive(replica, model, session):
        for _ in range([4, 2][replica]):
            session.run(model.train)
        return session.run([model.step, model.values])

    def build(task):
        return make(task, grads, aggregate=3, total_num_replicas=2)

    (step, values), _ = run_replicas(2, build, drive)
    assert step == 2
    np.testing.assert_array_equal(values[0], [-8.0] * 3)


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


def test_what_the_training_op_waits_for_runs_once_a_step_and_replica():
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


def test_moving_averages_are_taken_once_a_step():
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


def test_parameters_pulled_together_are_those_on_the_server():
    def build(task):
        with cluster.pulled_together(task):
            v = vector(value=3.0)
        loss = tf.reduce_sum(v * v) / 2
        opt = SyncReplicasOptimizer(sgd(0.5), 2, wait_timeout_s=30)
        step = v1.train.get_or_create_global_step()
        train = opt.minimize(loss, global_step=step)
        hook = opt.make_session_run_hook(task.is_chief)
        (master,) = v1.trainable_variables()
        assert master.device == "/job:ps/task:0"
        assert v.device == f"/job:worker/task:{task.index}"
        return SimpleNamespace(
            opt=opt, train=train, hooks=[hook], step=step, values=[master, v]
        )

    for (_, (master, copy)), _ in run_replicas(2, build, steps(2)):
        np.testing.assert_array_equal(master, [0.75] * 3)
        np.testing.assert_array_equal(copy, master)


def test_the_status_is_readable_from_any_replica():
    def drive(replica, model, session):
        session.run(model.train)
        session.run(model.train)
        return model.opt.status(session), model.opt.status_line(session)

    def grads(r):
        return [(tf.ones([3]), vector())]

    for status, line in run_replicas(2, lambda task: make(task, grads), drive):
        assert status.step == 2
        assert status.joined == (0, 1)
        assert status.steps_per_s > 0
        assert line.startswith("step 2, ")
        assert "0 stale gradients dropped" in line


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

"""What the optimizer computes, on replicas that are threads of one process."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import run_replicas
from syncrep_given import run, sgd, vector

from tw_syncrep import SyncReplicasOptimizer

v1 = tf.compat.v1
LOCAL_STEP = "sync_rep_local_step:0"


@pytest.mark.slow
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


@pytest.mark.slow
def test_compression_rounds_what_is_pushed_and_nothing_else():
    def grads(r):
        return [(tf.fill([3], 1.0 + 2.0**-12), vector(value=2.0**-10))]

    _, values, _ = run(grads, compression=tf.bfloat16)
    np.testing.assert_array_equal(values[0], [2.0**-10 - 1] * 3)
    _, values, _ = run(grads)
    np.testing.assert_array_equal(values[0], [2.0**-10 - 1 - 2.0**-12] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_the_local_step_has_tensorflows_name_and_the_global_steps_value(dtype):
    def build(task):
        step = v1.get_variable(
            "step", [], dtype, v1.constant_initializer(7), None, False
        )
        opt = SyncReplicasOptimizer(sgd(), 2, wait_timeout_s=30)
        train = opt.apply_gradients([(tf.ones([3]), vector())], global_step=step)
        hook = opt.make_session_run_hook(task.is_chief)
        (local,) = (v for v in v1.local_variables() if v.name == LOCAL_STEP)
        return SimpleNamespace(train=train, hooks=[hook], local=local)

    def drive(replica, model, session):
        before = session.run(model.local)
        session.run([model.train] * 2)
        session.run(model.train)
        return before, session.run(model.local)

    for steps_seen in run_replicas(2, build, drive):
        assert steps_seen == (7, 9)
        assert {step.dtype for step in steps_seen} == {np.dtype(dtype.as_numpy_dtype)}


class RowsSquared:
    """Moves rows by the square of their gradients, and takes each row for its own."""

    def compute_gradients(self, loss, var_list=None):
        raise NotImplementedError

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        ((grad, table),) = grads_and_vars
        change = tf.IndexedSlices(tf.square(grad.values), grad.indices)
        with tf.control_dependencies([table.scatter_sub(change)]):
            return global_step.assign_add(1, read_value=False)


@pytest.mark.slow
@pytest.mark.parametrize("sparse_mean", ["replicas", "per_row"])
def test_an_optimizer_that_does_not_add_rows_gets_each_of_them_once(sparse_mean):
    _, (means,), _ = run(rows, sparse_mean=sparse_mean)  # what one step of SGD is
    _, (values,), _ = run(rows, inner=RowsSquared(), sparse_mean=sparse_mean)
    assert np.count_nonzero(means) == 4
    np.testing.assert_array_equal(values, -(means**2))

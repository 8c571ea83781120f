"""Gradients of embeddings whose rows come several times, in both modes."""

import numpy as np
import pytest
import tensorflow as tf

v1 = tf.compat.v1

TABLE = np.arange(12, dtype=np.float32).reshape(6, 2) % 5 - 2
# Two towers, two steps of four rows: an index comes twice in a tower, and in both.
ROWS = np.int32([0, 0, 0, 2, 5, 1, 1, 1, 0, 2, 2, 0, 1, 5, 5, 3])


def pulled(variables, inputs):
    """Sparse: every hit of a row pulls it along (1, 2)."""
    rows = tf.gather(variables["table"], inputs["row"])
    return tf.reduce_sum(rows * [1.0, 2.0]) + tf.reduce_sum(tf.square(rows))


def trained_by_momentum(make_trainer, devices, bound=None, **options):
    """Looks a few rows up in each step; returns the table and NumPy's, dense."""
    trainer = make_trainer(
        pulled,
        {"table": TABLE},
        {"row": (np.int32, [])},
        devices=devices,
        maximum=4 // devices,
        opt=lambda: v1.train.MomentumOptimizer(0.25, 0.5),
        grad_norm_clipping=bound,
        **options,
    )
    trainer.load([ROWS])
    trainer.run_epochs(2)
    plan = trainer.report
    kept = ROWS[: plan.rows_per_device * devices].reshape(devices, -1)
    table, momentum = TABLE.copy(), np.zeros_like(TABLE)
    for _ in range(2):
        for rows in np.split(kept, plan.steps, axis=1):
            grad = np.zeros_like(table)
            np.add.at(grad, rows, ([1, 2] + 2 * table[rows]) / devices)
            norm = np.linalg.norm(grad)
            momentum = 0.5 * momentum + grad * min(1, (bound or norm) / norm)
            table -= 0.25 * momentum
    return trainer.weights()["table"], table


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("bound", [None, 0.5])
def test_rows_are_clipped_and_moved_on_as_one_dense_gradient(
    make_trainer, devices, bound
):
    got, dense = trained_by_momentum(make_trainer, devices, bound)
    np.testing.assert_allclose(got, dense, rtol=1e-5)


def test_sparse_gradients_leave_rows_alone_that_a_step_does_not_look_up(make_trainer):
    got, dense = trained_by_momentum(make_trainer, 1, sparse_gradients=True)
    assert not np.allclose(got, dense)
    with tf.Graph().as_default(), v1.Session() as sess:
        table, rows = tf.Variable(TABLE), v1.placeholder(tf.int32, [4])
        loss = pulled({"table": table}, {"row": rows})
        train = v1.train.MomentumOptimizer(0.25, 0.5).minimize(loss)
        sess.run(v1.global_variables_initializer())
        for step in [*np.split(ROWS, 4)] * 2:
            sess.run(train, {rows: step})
        alone = sess.run(table)
    np.testing.assert_allclose(got, alone, rtol=1e-5)

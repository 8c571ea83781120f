"""Workers of several towers: reduced inside each worker, then pushed once."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from cluster_threads import (
    TOWERS,
    WORKERS,
    devices_of,
    in_all_workers,
    start_servers,
)

from tw_core import towers
from tw_reduce import mean, sum_round_robin
from tw_syncrep import SyncReplicasOptimizer, cluster, training_session

v1 = tf.compat.v1
ROWS, STEPS = 4, 3


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Small whole numbers, so that sums are exact."""
    random = np.random.default_rng(0)
    rows = WORKERS * TOWERS * ROWS
    x = random.integers(-2, 3, (rows, 3)).astype(np.float32)
    return x, random.integers(-3, 4, (rows, 1)).astype(np.float32)


def one_device() -> np.ndarray:
    """Gradient descent on the whole batch, in NumPy."""
    x, y = batch()
    w = np.zeros((3, 1), np.float32)
    for _ in range(STEPS):
        w -= 0.125 * (x.T @ (x @ w - y)) / len(x)
    return w


def tower_gradient(w: Any, x: np.ndarray, y: np.ndarray) -> Any:
    loss = tf.reduce_sum(tf.square(x @ w - y)) / (2 * ROWS)
    return tf.gradients(loss, w)[0]


def train(task: Any, target: str) -> np.ndarray:
    x, y = batch()
    shards = np.arange(len(x)).reshape(WORKERS, TOWERS, ROWS)[task.index]
    with tf.Graph().as_default():
        with v1.device(cluster.device_setter(task)):
            w = v1.get_variable("w", [3, 1], initializer=v1.zeros_initializer())
            step = v1.train.get_or_create_global_step()
            grads = []
            devices = devices_of(task)
            for tower, rows in zip(towers(devices), shards, strict=True):
                with tower.scope():
                    grads.append([tower_gradient(w, x[rows], y[rows])])
            reduced = mean(partial(sum_round_robin, devices=devices))(grads)
            optimizer = SyncReplicasOptimizer(
                v1.train.GradientDescentOptimizer(0.125), WORKERS, wait_timeout_s=30
            )
            train_op = optimizer.apply_gradients([(reduced[0][0], w)], global_step=step)
        hook = optimizer.make_session_run_hook(task.is_chief)
        with training_session(
            target, task.is_chief, hooks=[hook], cluster=task, stop_grace_period_secs=5
        ) as session:
            for _ in range(STEPS):
                session.run(train_op)
            return session.run(w)


@pytest.mark.timeout(150)
def test_two_workers_of_two_towers_are_one_device_on_the_whole_batch():
    for weights in in_all_workers(start_servers(), train):
        np.testing.assert_allclose(weights, one_device(), rtol=2e-6, atol=1e-6)

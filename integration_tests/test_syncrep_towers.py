"""Workers of several towers: reduced inside each worker, then pushed once."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness.cluster_threads import (
    TOWERS,
    WORKERS,
    devices_of,
    in_all_workers,
    start_servers,
)

import tw_syncrep
from tw_core import towers
from tw_reduce import mean, sum_round_robin
from tw_syncrep import SyncReplicasOptimizer, training_session

v1 = tf.compat.v1
ROWS, STEPS, RATE = 4, 3, 0.125
MIB = 1 << 18  # elements of float32: from here on a tensor travels alone
WIDE = MIB // 2
SHAPES = {  # variables that travel in packs and alone; two are tables
    "kernel": [3, 1],
    "bias": [1],
    "wide": [3, WIDE],
    "small": [5, 1],
    "large": [MIB, 1],
}


def batch() -> tuple[np.ndarray, ...]:
    """Small whole numbers: features, rows of the tables, wanted values."""
    random = np.random.default_rng(0)
    rows = WORKERS * TOWERS * ROWS
    x = random.integers(-2, 3, (rows, 3)).astype(np.float32)
    ids = random.integers(0, 3, rows)  # some of them several times
    return x, ids, random.integers(-3, 4, (rows, 1)).astype(np.float32)


def predict(variables: list[Any], x: Any, ids: Any) -> Any:
    kernel, bias, wide, small, large = variables
    linear = x @ kernel + bias + tf.reduce_sum(x @ wide, 1, keepdims=True) / WIDE
    return linear + tf.gather(small, ids) + tf.gather(large, ids)


def one_device() -> list[np.ndarray]:
    """Gradient descent on the whole batch, in NumPy."""
    x, ids, y = batch()
    variables = [np.zeros(shape, np.float32) for shape in SHAPES.values()]
    kernel, bias, wide, small, large = variables
    for _ in range(STEPS):
        linear = x @ kernel + bias + (x @ wide).sum(1, keepdims=True) / WIDE
        error = (linear + small[ids] + large[ids] - y) * np.float32(RATE / len(x))
        kernel -= x.T @ error
        bias -= error.sum(0)
        wide -= x.T @ error / WIDE
        for table in (small, large):
            np.subtract.at(table, ids, error)
    return variables


def tower_gradients(variables: list[Any], x: Any, ids: Any, y: Any) -> list[Any]:
    error = predict(variables, x, ids) - y
    return tf.gradients(tf.reduce_sum(tf.square(error)) / (2 * ROWS), variables)


def train(task: Any, target: str, *, is_pulled: bool) -> list[np.ndarray]:
    given = batch()
    shards = np.arange(len(given[0])).reshape(WORKERS, TOWERS, ROWS)[task.index]
    pulled = tw_syncrep.pulled_together(task) if is_pulled else nullcontext()
    with tf.Graph().as_default():
        with v1.device(tw_syncrep.device_setter(task)):
            with pulled:
                first = v1.zeros_initializer()
                own = [
                    v1.get_variable(name, shape, initializer=first)
                    for name, shape in SHAPES.items()
                ]
            step = v1.train.get_or_create_global_step()
            grads = []
            devices = devices_of(task)
            for tower, rows in zip(towers(devices), shards, strict=True):
                with tower.scope():
                    grads.append(tower_gradients(own, *(part[rows] for part in given)))
            reduced = mean(partial(sum_round_robin, devices=devices))(grads)
            optimizer = SyncReplicasOptimizer(
                v1.train.GradientDescentOptimizer(RATE), WORKERS, wait_timeout_s=30
            )
            pairs = list(zip(reduced[0], own, strict=True))
            train_op = optimizer.apply_gradients(pairs, global_step=step)
        hook = optimizer.make_session_run_hook(task.is_chief)
        with training_session(
            target, task.is_chief, hooks=[hook], cluster=task, stop_grace_period_secs=5
        ) as session:
            for _ in range(STEPS):
                session.run(train_op)
            return session.run(own)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("is_pulled", [False, True], ids=["read", "pulled together"])
def test_two_workers_of_two_towers_are_one_device_on_the_whole_batch(is_pulled):
    for values in in_all_workers(start_servers(), partial(train, is_pulled=is_pulled)):
        for value, want in zip(values, one_device(), strict=True):
            np.testing.assert_allclose(value, want, rtol=2e-6, atol=1e-6)

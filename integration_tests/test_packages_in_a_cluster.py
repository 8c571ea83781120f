"""tw-syncrep with towers and tw-ampopt in each worker, and all packages together.

The cluster's servers run in this process and its workers in threads. Every wait has
a deadline.
"""

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
from programs.digits_towers import accuracy, cross_entropy, digits, get_weights

import tw_ampopt
import tw_core
import tw_rlload
import tw_syncrep
from tw_builders import SyncMultiGPUParameterServerBuilder
from tw_core.flat_variables import FlatVariables, pack_gradients
from tw_reduce import packed, sum_round_robin
from tw_syncrep import SyncReplicasOptimizer, training_session

pytestmark = pytest.mark.slow

v1 = tf.compat.v1
ROWS, WAIT_S = 32, 30


@pytest.fixture
def local() -> Any:
    return start_servers()


def shard(task: Any) -> tuple[np.ndarray, np.ndarray]:
    """The worker's part of the training rows."""
    train, _ = digits()
    return train.images[task.index :: WORKERS], train.labels[task.index :: WORKERS]


def make_optimizer(task: Any) -> tuple[tw_ampopt.Optimizer, SyncReplicasOptimizer]:
    scaled = tw_ampopt.Optimizer(
        tf_optimizer=v1.train.AdamOptimizer,
        learning_rate=0.05,
        loss_scale=tw_ampopt.DynamicLossScale(),
    )
    # The builder below leaves the device set, which otherwise gives the number.
    return scaled, SyncReplicasOptimizer(
        scaled, WORKERS, replica_index=task.index, wait_timeout_s=WAIT_S
    )


def session_for(task: Any, target: str, sync: SyncReplicasOptimizer) -> Any:
    hook = sync.make_session_run_hook(task.is_chief)
    return training_session(
        target, task.is_chief, hooks=[hook], cluster=task, stop_grace_period_secs=5
    )


def placeholders() -> list[list[Any]]:
    """Images and labels for each of a worker's towers."""
    return [
        [v1.placeholder(tf.float32, [ROWS, 64]), v1.placeholder(tf.int64, [ROWS])]
        for _ in range(TOWERS)
    ]


def feed_of(
    fed: list[list[Any]], task: Any, step: int, *, spoil: bool = False
) -> dict[Any, Any]:
    """Rows for each of a worker's towers; spoilt, with one infinity in the last."""
    images, labels = shard(task)
    feed = {}
    for k, (x, y) in enumerate(fed):
        start = (step * TOWERS + k) * ROWS % (len(images) - ROWS)
        feed[x] = images[start : start + ROWS].copy()
        feed[y] = labels[start : start + ROWS]
    if spoil:
        feed[x][0, 0] = np.inf
    return feed


def train_towers(task: Any, target: str, *, steps: int, bad: int) -> Any:
    """Two towers' gradients, added by a builder that is given the optimizer."""
    with tf.Graph().as_default():
        fed = placeholders()
        with v1.device(tw_syncrep.device_setter(task)):
            step = v1.train.get_or_create_global_step()
            scaled, sync = make_optimizer(task)
            weights = get_weights()

            def tower() -> Any:
                k = tw_core.get_current_tower_context().index
                return sync.compute_gradients(cross_entropy(weights, *fed[k]), weights)

            builder = SyncMultiGPUParameterServerBuilder(devices_of(task), "gpu")
            pairs = builder.call_for_each_tower(tower)
            train_op = builder.build(pairs, lambda: sync)
            slots = [scaled.get_slot(v, slot) for v in weights for slot in "mv"]
            told = scaled.statistics()
        with session_for(task, target, sync) as session:
            states = []
            for number in range(steps):
                spoil = number == bad and not task.is_chief
                session.run(train_op, feed_of(fed, task, number, spoil=spoil))
                states.append(session.run([[*weights, *slots], step, told]))
            return states


@pytest.mark.timeout(150)
def test_towers_and_ampopt_in_each_worker_skip_together_and_learn(local):
    steps, bad = 40, 5
    work = partial(train_towers, steps=steps, bad=bad)
    of_chief, of_other = in_all_workers(local, work)
    for one, other in zip(of_chief, of_other, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, one, other)
    before, after, later = of_chief[bad - 1 : bad + 2]
    tf.nest.map_structure(np.testing.assert_array_equal, after[0], before[0])
    assert not np.array_equal(later[0][0], after[0][0])
    last_kept, last_step, last_told = of_chief[-1]
    assert last_told["updates"] == steps - 1
    assert last_told["skipped_updates"] == 1
    assert last_told["loss_scaling_log2"] == 14.0  # from 15
    assert last_step == steps - 1  # grows by one with an update only
    assert accuracy(*last_kept[:3]) >= 0.9


def train_flat(task: Any, target: str, *, below_bytes: int, folder: str) -> Any:
    """Momentum on variables of the server, flat or not; weights and what is saved."""
    with tf.Graph().as_default():
        x, y = placeholders()[0]
        with v1.device(tw_syncrep.device_setter(task)):
            step = v1.train.get_or_create_global_step()
            sync = SyncReplicasOptimizer(
                v1.train.MomentumOptimizer(0.1, 0.9),
                WORKERS,
                replica_index=task.index,
                wait_timeout_s=WAIT_S,
            )
            with FlatVariables(below_bytes).scope():
                weights = get_weights()
                loss = cross_entropy(weights, x, y)
            pairs = pack_gradients(sync.compute_gradients(loss, weights))
            train_op = sync.apply_gradients(pairs, global_step=step)
            read = [w.read_value() for w in weights]
            saver = v1.train.Saver()
        with session_for(task, target, sync) as session:
            for number in range(6):
                session.run(train_op, feed_of([[x, y]], task, number))
            values = session.run(read)
            if task.is_chief:
                path = session.run_step_fn(
                    lambda step_context: saver.save(
                        step_context.session, f"{folder}/model"
                    )
                )
                values.append(dict(tf.train.list_variables(path)))
            return values


@pytest.mark.timeout(150)
def test_the_server_may_hold_flat_variables(tmp_path):
    found = []
    for below_bytes in (0, 10**6):
        folder = tmp_path / str(below_bytes)
        folder.mkdir()
        work = partial(train_flat, below_bytes=below_bytes, folder=str(folder))
        found.append(in_all_workers(start_servers(), work))
    (plain, other), (flat, _) = found
    tf.nest.map_structure(
        partial(np.testing.assert_allclose, rtol=1e-6), plain[:-1], other
    )
    tf.nest.map_structure(
        partial(np.testing.assert_allclose, rtol=1e-6), flat[:-1], plain[:-1]
    )
    assert flat[-1] == plain[-1]
    assert any(name.endswith("/Momentum") for name in flat[-1])


class Policy:
    """What ``build_graph`` of tw-rlload returns."""

    def __init__(self, weights: list[Any], inputs: list[Any]) -> None:
        self.weights = weights
        self.loss = cross_entropy(weights, *inputs)

    def gradients(self, optimizer: Any) -> Any:
        return optimizer.compute_gradients(self.loss, self.weights)


def train_with_all(task: Any, target: str, *, epochs: int) -> Any:
    """tw-rlload slices, tw-reduce averages, tw-ampopt scales, tw-syncrep applies."""
    with tf.Graph().as_default():
        with v1.device(tw_syncrep.device_setter(task)):
            step = v1.train.get_or_create_global_step()
            weights = get_weights()
            columns = [v1.placeholder(tf.float32, [None, 64], "images")]
            columns.append(v1.placeholder(tf.int64, [None], "labels"))
            _, sync = make_optimizer(task)
            towers = devices_of(task)
            trainer = tw_rlload.LocalSyncParallelOptimizer(
                sync,
                towers,
                columns,
                [],
                ROWS,
                partial(Policy, weights),
                reducer=packed(partial(sum_round_robin, devices=towers)),
            )
        with session_for(task, target, sync) as session:
            trainer.load_data(session, [*shard(task)], [])
            for _ in range(epochs):
                for offset in trainer.report.batch_offsets:
                    trainer.optimize(session, offset)
            return session.run([step, weights])


@pytest.mark.timeout(150)
def test_all_packages_together_learn_the_digits(local):
    results = in_all_workers(local, partial(train_with_all, epochs=2))
    tf.nest.map_structure(np.testing.assert_array_equal, results[0], results[1])
    steps, weights = results[0]
    assert 20 <= steps <= 100
    assert accuracy(*weights) >= 0.9

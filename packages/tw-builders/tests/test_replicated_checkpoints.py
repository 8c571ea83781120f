"""A checkpoint of a replicated run holds the model once, and resumes exactly."""

import logging
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from session_builders import build, pairs_of

from tw_builders import SyncMultiGPUReplicatedBuilder, SyncVariablesHook
from tw_core import get_current_tower_context
from tw_core.testing import CPUS
from tw_reduce import sum_balanced

v1 = tf.compat.v1
CONFIG = v1.ConfigProto(device_count={"CPU": len(CPUS)})
OPTIMIZERS = {
    "momentum": partial(v1.train.MomentumOptimizer, 0.05, 0.9),
    "adam": partial(v1.train.AdamOptimizer, 0.02),
}


class Run:
    """A replicated training graph with batch normalisation and moving averages."""

    def __init__(self, optimizer, num_towers=2):
        self.graph = tf.Graph()
        with self.graph.as_default():
            v1.set_random_seed(5)
            self.x = v1.placeholder(tf.float32, [4 * num_towers, 3])
            self.shards = tf.split(self.x, num_towers)
            devices = list(CPUS[:num_towers])
            builder = SyncMultiGPUReplicatedBuilder(
                devices, average=True, mode=partial(sum_balanced, devices=devices)
            )
            _, self.train_op, self.sync = build(
                builder, self._tower, OPTIMIZERS[optimizer]
            )
            self.updates = tf.group(*v1.get_collection(v1.GraphKeys.UPDATE_OPS))
            self.globals = v1.global_variables()
            self.locals = v1.local_variables()

    def _tower(self):
        context = get_current_tower_context()
        w = v1.get_variable("w", [3, 2])
        mean = v1.get_variable("mean", [2], trainable=False)
        out = self.shards[context.index] @ w
        average = tf.train.ExponentialMovingAverage(0.9)
        for update in (
            mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(out, 0)).op,
            average.apply([w]),
        ):
            v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
        loss = tf.reduce_mean((out - 1.0) ** 2)
        return pairs_of(loss, [w])

    def step(self, session, batch):
        # In two calls: the updates read what the training op writes.
        session.run(self.train_op, {self.x: batch})
        session.run(self.updates, {self.x: batch})


def batches(count, rows=8):
    return np.random.default_rng(2).standard_normal((count, rows, 3), np.float32)


def test_the_sync_op_names_variables_that_it_cannot_copy(caplog):
    with tf.Graph().as_default():
        builder = SyncMultiGPUReplicatedBuilder(list(CPUS[:2]), True, "cpu")

        def tower():
            w = v1.get_variable("w", [2])
            if get_current_tower_context().index:
                v1.get_variable("only_here", [2], trainable=False)
            return pairs_of(tf.reduce_sum(w**2), [w])

        with caplog.at_level(logging.WARNING, "tw_builders"):
            build(builder, tower, OPTIMIZERS["momentum"])
    assert "tower1/only_here:0" in caplog.text
    assert "keep their own values" in caplog.text


def test_the_sync_op_refuses_a_trainable_variable_that_it_cannot_copy():
    with tf.Graph().as_default():
        v1.get_variable("tower1/w", [2])
        with pytest.raises(ValueError, match=r"no counterpart.*\['tower1/w:0'\]"):
            SyncMultiGPUReplicatedBuilder.get_post_init_ops()


def test_one_tower_needs_no_sync_op():
    assert Run("adam", num_towers=1).sync is None


@pytest.mark.slow(by_day=["momentum"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_hook_syncs_a_monitored_session_that_goes_on_as_if_never_stopped(
    tmp_path, optimizer
):
    data = batches(4)

    def train_monitored(count):
        run = Run(optimizer)
        with run.graph.as_default():
            step = v1.train.get_or_create_global_step()
            advance = step.assign_add(1)
            session = v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path),
                hooks=[SyncVariablesHook(run.sync)],
                config=CONFIG,
                save_checkpoint_steps=1,
            )
        w, copy = [
            next(v for v in all_of if v.name.endswith("w:0"))
            for all_of in (run.globals, run.locals)
        ]
        with run.graph.as_default(), session:
            np.testing.assert_array_equal(*session.run([w, copy]))
            start = session.run(step)
            for batch in data[start : start + count]:
                run.step(session, batch)
                session.run(advance)
            np.testing.assert_array_equal(*session.run([w, copy]))
            return start, {v.name: session.run(v) for v in run.globals}

    first, _ = train_monitored(2)
    second, resumed = train_monitored(2)
    assert (first, second) == (0, 2)
    names = {name for name, _ in tf.train.list_variables(str(tmp_path))}
    slots = {"momentum": {"w/Momentum"}, "adam": {"w/Adam", "w/Adam_1"}}[optimizer]
    slots |= {"beta1_power", "beta2_power"} if optimizer == "adam" else set()
    model = {"w", "mean", "w/ExponentialMovingAverage", "global_step"}
    assert names == model | slots
    for file in tmp_path.iterdir():
        file.unlink()
    _, straight = train_monitored(4)
    for name, value in straight.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)

"""A policy trained by PPO on two towers: tw-rlload at work.

Each batch is loaded onto the towers once, and trained on for several epochs in
one session call.
"""

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from collecting import Collector, make_envs
from policies import COLUMNS, Acting, PpoLoss, Shape, placeholders
from tasks import Task

import tw_core
import tw_rlload

v1 = tf.compat.v1


class Learner:
    """Learns one task; builds in the default graph."""

    def __init__(self, task: Task, *, num_towers: int, seed: int) -> None:
        self._task, self._random = task, np.random.default_rng(seed)
        v1.set_random_seed(seed)
        envs = make_envs(task.env, task.num_envs, task.shown)
        # Plays, and keeps the returns of all episodes
        self.collector = Collector(envs, state_size=task.state, seed=seed)
        self._shape = Shape(
            seen=envs.single_observation_space.shape[0],
            actions=int(envs.single_action_space.n),
            hidden=64,
            state=task.state,
            steps=task.sequence,
        )
        self._rate = v1.placeholder(tf.float32, [])
        self._feeds = {self._rate: task.rate}
        self._acting = Acting(self._shape)
        self._optimizer = self._build(num_towers)

    def start(self, sess: tf.compat.v1.Session) -> None:
        """Initialises the policy."""
        sess.run(v1.global_variables_initializer())
        self._sess = sess
        self._act = sess.make_callable(self._acting.outputs, self._acting.inputs)

    def learn(self, done: float) -> tw_rlload.EpochResult:
        """Collects a batch and trains on it."""
        task = self._task
        batch = self.collector.collect(self._act, task.num_steps, task.discounts)
        self._feeds[self._rate] = task.rate * (1 - done)
        self._optimizer.load_data(self._sess, *_columns(batch, task))
        seed = int(self._random.integers(2**31))
        return self._optimizer.run_epochs(self._sess, task.epochs, "rows", seed=seed)

    def _build(self, num_towers: int) -> tw_rlload.LocalSyncParallelOptimizer:
        task = self._task
        rows, states = placeholders(self._shape)
        build = partial(
            PpoLoss, shape=self._shape, weighting=task.weighting, feeds=self._feeds
        )
        return tw_rlload.LocalSyncParallelOptimizer(
            v1.train.AdamOptimizer(self._rate, epsilon=1e-5),
            tw_core.devices.available_devices()[:num_towers],
            rows,
            states,
            task.minibatch // num_towers,
            build,
            grad_norm_clipping=0.5,
        )


def _columns(batch: dict[str, Any], task: Task) -> tuple[dict[str, Any], Any]:
    advantages = batch["advantages"]
    spread = advantages.std() + 1e-8
    batch["advantages"] = (advantages - advantages.mean()) / spread
    rows = {name: _by_row(batch[name]) for name in COLUMNS}
    if not task.state:
        return rows, []
    return rows, {"states": _by_row(batch["states"][:, :: task.sequence])}


def _by_row(column: Any) -> Any:
    return column.reshape(-1, *column.shape[2:])

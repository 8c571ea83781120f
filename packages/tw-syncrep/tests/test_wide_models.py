"""Models with variables on both sides of a mebibyte, from where on they travel alone.

Compared with one device that takes the mean of the replicas' losses.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import run_replicas

import tw_syncrep
from tw_syncrep import SyncReplicasOptimizer

v1 = tf.compat.v1
STEPS = 3
# The third has a mebibyte, the fourth a row more, the fifth a row less.
SHAPES = ([], [3], [512, 512], [513, 512], [511, 512], [40, 5])
TABLE = [600, 512]
IDS = ([0, 5, 5], [5, 599, 0])
FACTORS = (1.0, 3.0)
OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.125),
    "momentum": lambda: v1.train.MomentumOptimizer(0.125, 0.5),
    "adam": lambda: v1.train.AdamOptimizer(0.125),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.125),
}


def variables():
    def start(shape):
        count = int(np.prod(shape))
        return v1.constant_initializer((np.arange(count) % 7 - 3).reshape(shape))

    shapes = [*SHAPES, TABLE]
    return [
        v1.get_variable(f"v{n}", shape, initializer=start(shape))
        for n, shape in enumerate(shapes)
    ]


def loss_of(made, replica):
    *dense, table = made
    loss = sum(tf.reduce_sum(v * v) / 2 for v in dense)
    rows = tf.gather(table, IDS[replica])
    return FACTORS[replica] * (loss + tf.reduce_sum(rows))


def on_one_device(inner):
    with tf.Graph().as_default(), v1.Session() as session:
        made = variables()
        loss = sum(loss_of(made, replica) for replica in range(2)) / 2
        train = OPTIMIZERS[inner]().minimize(loss)
        session.run(v1.global_variables_initializer())
        for _ in range(STEPS):
            session.run(train)
        return session.run(made)


@pytest.mark.full("sgd-True")
@pytest.mark.parametrize("pulled", [True, False])
@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.each_choice
def test_replicas_train_as_one_device(inner, pulled):
    def build(task):
        with tw_syncrep.pulled_together(task) if pulled else nullcontext():
            made = variables()
        step = v1.train.get_or_create_global_step()
        opt = SyncReplicasOptimizer(OPTIMIZERS[inner](), 2, wait_timeout_s=30)
        loss = loss_of(made, task.replica_index)
        train = opt.minimize(loss, global_step=step)
        if pulled:
            copied = {cached.copy.name for cached in tw_syncrep.cached_parameters()}
            assert [v.name in copied for v in made] == [1, 1, 0, 0, 1, 1, 0]
        hook = opt.make_session_run_hook(task.is_chief)
        packs = [
            len(pack.indices)
            for payload in opt.sync_graph.state.payloads
            for pack in payload.packs
        ]
        assert sorted(packs)[:2] == [1, 1] and sum(packs) == len(SHAPES)
        assert max(packs) > 1
        return SimpleNamespace(train=train, hooks=[hook], made=made)

    def drive(replica, model, session):
        for _ in range(STEPS):
            session.run(model.train)
        return session.run(model.made)

    want = on_one_device(inner)
    for values in run_replicas(2, build, drive):
        for got, wanted in zip(values, want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)

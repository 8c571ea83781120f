"""tw-ampopt's optimizers in builders and over a cluster."""

import numpy as np
import pytest
import tensorflow as tf
from cluster_threads import in_all_workers, start_servers

import tw_ampopt
import tw_core
import tw_syncrep
from tw_builders import (
    SyncMultiGPUParameterServerBuilder,
    SyncMultiGPUReplicatedBuilder,
    SyncMultiGPUShardedBuilder,
    apply_gradients,
)
from tw_core.testing import CPUS
from tw_syncrep import SyncReplicasOptimizer, training_session

v1 = tf.compat.v1
START = [3.0, -2.0]
FEEDS = [[1.0, 2.0], [0.5, -1.0], [np.nan, 1.0], [2.0, 0.25], [-1.0, 1.0]]


def ours():
    return tw_ampopt.Optimizer(
        learning_rate=0.1, loss_scale=tw_ampopt.DynamicLossScale(), master_copies=True
    )


@pytest.fixture(scope="module")
def by_adam():
    """What Adam makes of the finite feeds on one device."""
    w = tf.Variable(START)
    adam = v1.train.AdamOptimizer(0.1)
    for feed in FEEDS:
        if np.isfinite(feed).all():
            adam.apply_gradients([(tf.constant(feed), w)])
    return w.numpy()


def build_parameter_server(tower_fn):
    builder = SyncMultiGPUParameterServerBuilder(list(CPUS[:2]), ps_device="cpu")
    grads = builder.call_for_each_tower(tower_fn)
    return builder.build(grads, ours), grads


def build_replicated(tower_fn):
    builder = SyncMultiGPUReplicatedBuilder(list(CPUS[:2]), average=True, mode="cpu")
    grads = builder.call_for_each_tower(tower_fn)
    train_op, _ = builder.build(grads, ours)
    return train_op, grads


def build_sharded(tower_fn):
    builder = SyncMultiGPUShardedBuilder(list(CPUS[:2]), average=True)
    grads = builder.call_for_each_tower(tower_fn)
    train_op, _ = builder.build(grads, ours)
    return train_op, grads


@pytest.mark.parametrize(
    "build", [build_parameter_server, build_replicated, build_sharded]
)
def test_a_builder_trains_with_it_and_skips_what_is_not_finite(build, by_adam):
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [2])

        def tower():
            w = v1.get_variable("w", initializer=START)
            factor = 0.5 + tw_core.get_current_tower_context().index
            return [(tf.gradients(tf.reduce_sum(w * x) * factor, w)[0], w)]

        train_op, grads = build(tower)
        saved = [v.name for v in v1.global_variables() if "loss_scaling" in v.name]
        config = v1.ConfigProto(device_count={"CPU": len(CPUS)})
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            session.run(v1.local_variables_initializer())
            for feed in FEEDS:
                session.run(train_op, {x: feed})
            for values in session.run([[v for _, v in tower] for tower in grads]):
                np.testing.assert_allclose(values[0], by_adam, rtol=2e-6)
    assert len(saved) == 1, "one copy of the state is saved"


def test_a_sharded_run_saves_the_names_of_a_replicated_one():
    def tower():
        dtypes = [tf.float16, tf.float32, tf.float16]
        variables = [
            v1.get_variable(f"layer/w{n}", [3 + n], dtype)
            for n, dtype in enumerate(dtypes)
        ]
        return [(tf.ones(v.shape, v.dtype), v) for v in variables]

    def saved(build):
        with tf.Graph().as_default():
            build(tower)
            return {v.name: v.shape.as_list() for v in v1.global_variables()}

    sharded = saved(build_sharded)
    assert any("w0_master" in name for name in sharded)
    assert sharded == saved(build_replicated)


def test_replicas_in_a_function_train_with_it(by_adam):
    towers = tw_core.towers(list(CPUS[:2]))
    replicas = [[tf.Variable(START)] for _ in towers]
    optimizers = [
        tw_ampopt.TowerOptimizer(
            own,
            name=tower.name,
            learning_rate=0.1,
            loss_scale=tw_ampopt.DynamicLossScale(),
        )
        for tower, own in zip(towers, replicas, strict=True)
    ]

    @tf.function
    def step(grad):
        apply_gradients(towers, [[grad], [grad]], replicas, optimizers)

    for feed in FEEDS:
        step(tf.constant(feed))
    for [w] in replicas:
        np.testing.assert_allclose(w, by_adam, rtol=2e-6)
    assert [int(o.statistics()["skipped_updates"]) for o in optimizers] == [1, 1]


def train_over_a_cluster(task, target):
    with tf.Graph().as_default():
        with v1.device(tw_syncrep.device_setter(task)):
            w = v1.get_variable("w", initializer=START)
            step = v1.train.get_or_create_global_step()
            x = v1.placeholder(tf.float32, [2])
            optimizer = SyncReplicasOptimizer(ours(), 1, wait_timeout_s=30)
            pairs = optimizer.compute_gradients(tf.reduce_sum(w * x), [w])
            train_op = optimizer.apply_gradients(pairs, global_step=step)
        hook = optimizer.make_session_run_hook(task.is_chief)
        with training_session(
            target, task.is_chief, hooks=[hook], cluster=task, stop_grace_period_secs=5
        ) as session:
            for feed in FEEDS:
                if np.isfinite(feed).all():
                    session.run(train_op, {x: feed})
            return session.run(w)


@pytest.mark.timeout(150)
def test_replicas_over_a_cluster_train_with_it(by_adam):
    [w] = in_all_workers(start_servers(workers=1), train_over_a_cluster)
    np.testing.assert_allclose(w, by_adam, rtol=2e-6)

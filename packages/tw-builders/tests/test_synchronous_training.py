"""K towers on the shards of a batch train as one device does on the whole batch."""

from functools import cache, partial

import numpy as np
import pytest
import tensorflow as tf
from session_builders import SYNCHRONOUS, build, new_session, pairs_of

from tw_builders import SyncMultiGPUReplicatedBuilder
from tw_core import get_current_tower_context, towers
from tw_core.testing import CPUS
from tw_reduce import sum_balanced

v1 = tf.compat.v1
STEPS = 8
OPTIMIZERS = {
    "gradient descent": partial(v1.train.GradientDescentOptimizer, 0.1),
    "momentum": partial(v1.train.MomentumOptimizer, 0.05, 0.9),
    "adam": partial(v1.train.AdamOptimizer, 0.02),
}
BUILDERS = SYNCHRONOUS | {
    "replicated, balanced": lambda devices: SyncMultiGPUReplicatedBuilder(
        devices, average=True, mode=partial(sum_balanced, devices=devices)
    )
}
WEIGHTS = {
    "hidden/kernel": np.linspace(-0.8, 0.9, 12, dtype=np.float32).reshape(3, 4),
    "hidden/bias": np.linspace(-0.1, 0.1, 4, dtype=np.float32),
    "out": np.linspace(0.5, -0.7, 4, dtype=np.float32).reshape(4, 1),
    # Above both packing thresholds (4,096 and 16,384 elements), and between them.
    "wide": np.linspace(-0.1, 0.1, 3 * 6_000, dtype=np.float32).reshape(3, 6_000),
    "middle": np.linspace(0.1, -0.1, 3 * 2_000, dtype=np.float32).reshape(3, 2_000),
}
each_builder = pytest.mark.parametrize("builder", BUILDERS)
each_count = pytest.mark.parametrize("num_towers", [1, 2, 4])


def batches():
    random = np.random.default_rng(7)
    for _ in range(STEPS):
        x = random.standard_normal((8, 3), np.float32)
        yield x, np.sin(x.sum(1, keepdims=True)).astype(np.float32)


def model_loss(x, y):
    def variable(name):
        return v1.get_variable(name, initializer=WEIGHTS[name])

    hidden = tf.tanh(x @ variable("hidden/kernel") + variable("hidden/bias"))
    sums = [
        tf.reduce_sum(tf.tanh(x @ variable(name)), axis=1, keepdims=True)
        for name in ("wide", "middle")
    ]
    return tf.reduce_mean((hidden @ variable("out") + 0.001 * tf.add_n(sums) - y) ** 2)


@cache
def train_on_one_device(optimizer):
    with tf.Graph().as_default():
        x, y = v1.placeholder(tf.float32, [8, 3]), v1.placeholder(tf.float32, [8, 1])
        loss = model_loss(x, y)
        variables = v1.trainable_variables()
        train_op = OPTIMIZERS[optimizer]().apply_gradients(pairs_of(loss, variables))
        with new_session() as session:
            losses = [
                session.run([loss, train_op], {x: a, y: b})[0] for a, b in batches()
            ]
            return losses, session.run(variables)


def build_graph(builder, num_towers, optimizer):
    x, y = v1.placeholder(tf.float32, [8, 3]), v1.placeholder(tf.float32, [8, 1])
    shards = list(zip(tf.split(x, num_towers), tf.split(y, num_towers), strict=True))
    built = BUILDERS[builder](list(CPUS[:num_towers]))

    def tower():
        context = get_current_tower_context()
        loss = model_loss(*shards[context.index])
        own = context.get_collection_in_tower("trainable_variables")
        return loss, pairs_of(loss, own or v1.trainable_variables())

    losses, grads = zip(*built.call_for_each_tower(tower), strict=True)
    train_op = built.build(grads, OPTIMIZERS[optimizer])
    train_op = train_op[0] if isinstance(train_op, tuple) else train_op
    return (x, y), losses, train_op, [[v for _, v in tower] for tower in grads]


def train(builder, num_towers, optimizer):
    """Returns losses [steps][K] and variables [steps][K][N]."""
    with tf.Graph().as_default():
        (x, y), losses, train_op, variables = build_graph(
            builder, num_towers, optimizer
        )
        with new_session() as session:
            all_losses, all_values = [], []
            for a, b in batches():
                feed = {x: a, y: b}
                all_losses.append(session.run([losses, train_op], feed)[0])
                all_values.append(session.run(variables))
            return all_losses, all_values


each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


@pytest.mark.slow(
    by_day=[
        "gradient descent-1-sharded",
        "adam-2-parameter server",
        "momentum-4-spread server",
        "momentum-2-replicated",
        "gradient descent-4-replicated, balanced",
        "adam-4-sharded",
    ]
)
@each_builder
@each_count
@each_optimizer
def test_towers_reach_the_variables_of_one_device(builder, num_towers, optimizer):
    """Replicas are equal after every step; functions are in test_function_models."""
    wanted_losses, wanted = train_on_one_device(optimizer)
    losses, values = train(builder, num_towers, optimizer)
    np.testing.assert_allclose(np.mean(losses, axis=1), wanted_losses, atol=2e-6)
    for got, want in zip(values[-1][0], wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)
    for step in values:
        for replica in step[1:]:
            for got, want in zip(replica, step[0], strict=True):
                np.testing.assert_array_equal(got, want)
    assert not np.array_equal(values[0][0][0], values[-1][0][0])


@pytest.mark.slow(by_day=["spread server", "replicated, balanced"])
@pytest.mark.parametrize("builder", BUILDERS)
def test_operations_grow_linearly_with_towers_and_variables(builder):
    def count(num_towers, num_variables):
        built = BUILDERS[builder](list(CPUS[:num_towers]))

        def tower():
            variables = [
                v1.get_variable(f"w{n}", initializer=np.float32([1, 2]))
                for n in range(num_variables)
            ]
            return [(tf.constant([0.5, 1.5]), w) for w in variables]

        with tf.Graph().as_default() as graph:
            grads = built.call_for_each_tower(tower)
            before = len(graph.get_operations())
            built.build(grads, OPTIMIZERS["gradient descent"])
            return len(graph.get_operations()) - before

    counts = np.array([[count(k, n) for n in (12, 24, 36)] for k in (2, 3, 4)])
    np.testing.assert_array_equal(np.diff(counts, 2, axis=1), 0)
    # Beside it some for each pair of devices, however many variables there are.
    assert np.abs(np.diff(counts, 2, axis=0)).max() <= 3 * np.diff([4, 9, 16], 2)
    per_tower_and_variable = np.diff(np.diff(counts, axis=0), axis=1) / 12
    assert np.unique(per_tower_and_variable).size == 1
    assert per_tower_and_variable.max() <= 8


@pytest.mark.parametrize("make", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_a_builder_takes_devices_or_towers(make):
    def tower():
        w = v1.get_variable("w", initializer=[3.0, -2.0])
        return pairs_of(tf.reduce_sum(w**2), [w])

    def graph_of(ours):
        with tf.Graph().as_default() as graph:
            builder = make(ours)
            assert builder.devices == list(CPUS[:2])
            build(builder, tower, OPTIMIZERS["momentum"])
            return graph.as_graph_def()

    assert graph_of(towers(list(CPUS[:2]))) == graph_of(list(CPUS[:2]))

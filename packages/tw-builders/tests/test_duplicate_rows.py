"""Sparse gradients with repeated rows train as their sum, whatever the optimizer."""

from functools import cache, partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_builders import (
    apply_gradients,
    apply_sharded_gradients,
    apply_shared_gradients,
    make_sharded_optimizer,
)
from tw_core import towers
from tw_core.testing import CPUS, SparseRows
from tw_reduce import broadcast, mean, packed, sum_balanced

KERAS_3 = [
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb"),
    *("Lion", "Nadam", "RMSprop", "SGD"),
]
V1 = ["AdamOptimizer", "AdagradOptimizer", "RMSPropOptimizer"]
# On both sides of the 4,096 elements from which packs leave a tensor alone.
TABLES = [np.ones((6, 3), np.float32), np.ones((2_000, 3), np.float32)]
BIAS = np.ones(2, np.float32)
STEPS = 3
RATE = 0.1


def make_optimizer(name):
    if name in V1:
        return getattr(tf.compat.v1.train, name)(RATE)
    return getattr(keras.optimizers, name)(RATE)


def gradients_of(seed):
    """Two tables' rows, in no order, which repeat within and between towers."""
    random = np.random.default_rng(seed)
    indices = random.permutation([1, 4, 1, 4, 4]), random.permutation([1_999, 0, 1_999])
    sparse = [
        SparseRows(
            random.integers(-4, 5, (len(rows), 3)).astype(np.float32),
            rows,
            np.array(table.shape),
        )
        for rows, table in zip(indices, TABLES, strict=True)
    ]
    return [*sparse, random.integers(-4, 5, 2).astype(np.float32)]


def make_variables():
    return [tf.Variable(value) for value in (*TABLES, BIAS)]


@cache
def train_on_one_device(name, num_towers):
    """Trains on the dense mean of the towers' gradients."""
    variables, optimizer = make_variables(), make_optimizer(name)
    for step in range(STEPS):
        grads = [gradients_of((step, k)) for k in range(num_towers)]
        dense = [
            [getattr(g, "to_dense", lambda g=g: g)() for g in own] for own in grads
        ]
        means = [
            tf.constant(np.float32(sum(column) / num_towers))
            for column in zip(*dense, strict=True)
        ]
        optimizer.apply_gradients(zip(means, variables, strict=True))
    return [variable.numpy() for variable in variables]


def eagerly(step):
    return step


def in_function(step):
    return tf.function(step, autograph=False)


def run_steps(step, num_towers):
    for number in range(STEPS):
        step(
            [list(map(to_tensor, gradients_of((number, k)))) for k in range(num_towers)]
        )


def to_tensor(grad):
    if not isinstance(grad, SparseRows):
        return tf.constant(grad)
    return tf.IndexedSlices(*map(tf.constant, grad))


def train_shared(name, num_towers, run):
    variables, optimizer = make_variables(), make_optimizer(name)
    prepare(optimizer, variables)

    def step(grads):
        pairs = [list(zip(own, variables, strict=True)) for own in grads]
        apply_shared_gradients(pairs, optimizer)

    run_steps(run(step), num_towers)
    return [[variable.numpy() for variable in variables]]


def train_replicated(name, num_towers, run):
    ours = towers(list(CPUS[:num_towers]))
    replicas = [make_variables() for _ in ours]
    optimizers = [make_optimizer(name) for _ in ours]
    for optimizer, variables in zip(optimizers, replicas, strict=True):
        prepare(optimizer, variables)
    reducer = mean(packed(broadcast(partial(sum_balanced, devices=CPUS[:num_towers]))))

    def step(grads):
        apply_gradients(ours, reducer(grads), replicas, optimizers)

    run_steps(run(step), num_towers)
    return [[variable.numpy() for variable in replica] for replica in replicas]


def train_sharded(name, num_towers, run):
    ours, replicas = towers(list(CPUS[:num_towers])), []
    for tower in ours:
        with tf.device(tower.device):
            replicas.append(make_variables())
    optimizer, _ = make_sharded_optimizer(ours, partial(make_optimizer, name), replicas)

    def step(grads):
        apply_sharded_gradients(ours, grads, replicas, optimizer)

    run_steps(run(step), num_towers)
    return [[variable.numpy() for variable in replica] for replica in replicas]


def prepare(optimizer, variables):
    """Makes the optimizer's state before a function is traced."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:
        optimizer._create_slots(variables)
        optimizer._prepare()


@pytest.mark.parametrize(
    ("train", "num_towers", "run"),
    [
        (train_shared, 1, eagerly),
        (train_shared, 2, in_function),
        (train_replicated, 2, in_function),
        (train_sharded, 2, in_function),
        (train_sharded, 2, eagerly),
    ],
)
@pytest.mark.parametrize("name", [*KERAS_3, *V1])
@pytest.mark.each_choice
def test_repeated_rows_train_as_one_device_does_on_their_sum(
    train, name, num_towers, run
):
    wanted = train_on_one_device(name, num_towers)
    for replica in train(name, num_towers, run):
        for value, want in zip(replica, wanted, strict=True):
            np.testing.assert_allclose(value, want, rtol=2e-6, atol=1e-6)

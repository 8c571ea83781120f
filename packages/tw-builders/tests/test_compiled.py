"""Steps of towers whose gradients and updates XLA compiles; what travels in packs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_builders import (
    apply_gradients,
    apply_sharded_gradients,
    apply_shared_gradients,
    make_optimizers,
    make_sharded_optimizer,
)
from tw_core import LeastLoadedDeviceSetter, map_towers, replicate, towers
from tw_core.testing import CPUS
from tw_reduce import all_reduce, mean

KINDS = ("replicated", "sharded", "parameter server")
# On both sides of 4,096 elements, below which variables travel in packs.
SHAPES = [(3,), (64, 64), (2, 5), (63, 65), (), (7, 1), (4,)]
ROWS = np.linspace(1, 3, 4, dtype="f")


class Model(tf.Module):
    """Many variables, of two dtypes."""

    def __init__(self):
        super().__init__()
        self.all = [
            tf.Variable(
                np.full(shape, 0.1 * n), dtype="float64" if n == 5 else "float32"
            )
            for n, shape in enumerate(SHAPES)
        ]

    def loss(self, x):
        goal = tf.reduce_mean(x)
        losses = [tf.reduce_mean((v - tf.cast(goal, v.dtype)) ** 2) for v in self.all]
        return tf.add_n([tf.cast(loss, tf.float32) for loss in losses])


def adam():
    return keras.optimizers.Adam(0.1)


def scaled():
    return keras.optimizers.LossScaleOptimizer(adam())


def built(kind, num_towers, *, jit_compile, make=adam):
    """Returns a step over the towers, their models, and what a checkpoint saves."""
    ours = towers(CPUS[:num_towers])
    if kind == "parameter server":
        setter = LeastLoadedDeviceSetter(CPUS[0], list(CPUS[:num_towers]))
        with tf.variable_creator_scope(setter.create):
            replicas = [Model()]
        models, optimizers = (
            replicas * num_towers,
            make_optimizers(ours[:1], make, replicas),
        )
    else:
        models = replicas = replicate(ours, lambda tower: Model())
        optimizers = make_optimizers(ours, make, replicas)
        if kind == "sharded":
            optimizers = make_sharded_optimizer(ours, make, replicas)
    reduce = mean(all_reduce(CPUS[:num_towers]))

    def gradients(tower, model, x, scale):
        with tf.GradientTape() as tape:
            loss = model.loss(x) * scale
        return tape.gradient(loss, model.trainable_variables)

    @tf.function(autograph=False)
    def step(xs):
        scales = [optimizers[0].scale_loss(tf.constant(1.0))] * num_towers
        grads = map_towers(
            *(gradients, ours, models, xs, scales),
            trace="once",
            jit_compile=jit_compile,
        )
        if kind == "replicated":
            apply_gradients(
                ours, reduce(grads), replicas, optimizers, jit_compile=jit_compile
            )
        elif kind == "sharded":
            apply_sharded_gradients(
                ours, grads, replicas, optimizers[0], jit_compile=jit_compile
            )
        else:
            pairs = [list(zip(own, models[0].all, strict=True)) for own in grads]
            apply_shared_gradients(pairs, optimizers[0], jit_compile=jit_compile)

    saved = optimizers[1:] if kind == "sharded" else optimizers
    return step, models, tf.train.Checkpoint(models=replicas, optimizers=list(saved))


def parts(num_towers):
    return [tf.constant(own) for own in np.split(ROWS, num_towers)]


def expected(steps=3):
    """Trains on one device, by Keras alone."""
    model, optimizer = Model(), adam()
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = model.loss(ROWS)
        pairs = zip(tape.gradient(loss, model.all), model.all, strict=True)
        optimizer.apply_gradients(pairs)
    return [v.numpy() for v in model.all]


@pytest.mark.slow(by_day=["replicated-2"])
@pytest.mark.parametrize("num_towers", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_are_those_of_one_device(kind, num_towers):
    step, models, _ = built(kind, num_towers, jit_compile=True)
    for _ in range(3):
        step(parts(num_towers))
    for model in models:
        for own, want in zip(model.all, expected(), strict=True):
            np.testing.assert_allclose(own.numpy(), want, 2e-6, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_of_one_tower_skips_on_all_and_steps_go_on_uncompiled(kind, tmp_path):
    first, models, saved = built(kind, 2, jit_compile=True, make=scaled)
    second, others, restored = built(kind, 2, jit_compile=False, make=scaled)
    for rows in (parts(2), parts(2), [ROWS[:2], ROWS[2:] * np.nan], parts(2)):
        first([tf.constant(own) for own in rows])
    restored.restore(saved.save(tmp_path / "at")).assert_consumed()
    for run in (first, second) * 2:
        run(parts(2))
    for model in (*models, *others):
        for own, want in zip(model.all, expected(steps=5), strict=True):
            np.testing.assert_allclose(own.numpy(), want, 2e-6, 2e-6)


@pytest.mark.parametrize("kind", ["sharded", "parameter server"])
def test_owners_send_small_variables_as_one_tensor(kind):
    step, *_ = built(kind, 2, jit_compile=kind != "sharded")
    sent = {
        (tensor.name, op.device)
        for op in step.get_concrete_function(parts(2)).graph.get_operations()
        for tensor in op.inputs
        if tensor.dtype != tf.resource
        if tensor.device and op.device and tensor.device[-5:] != op.device[-5:]
    }
    assert len(sent) <= 10, sent  # packs and two large ones, each way, and counts


def test_small_gradients_leave_and_enter_compiled_functions_as_packs():
    step, *_ = built("replicated", 2, jit_compile=True)
    graph = step.get_concrete_function(parts(2)).graph
    sums = [op for op in graph.get_operations() if op.type == "AddN"]
    assert len(sums) == 3  # a pack, and what is alone: of 4,096 elements, of float64
    found, stack = set(), list(graph.control_outputs)
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    assert not {"ConcatV2", "SplitV", "Slice"} & {op.type for op in found}


def test_a_sharded_variable_of_unknown_shape_is_no_part_of_a_pack():
    ours = towers(CPUS[:2])

    def make(tower):
        model = tf.Module()
        model.rows = tf.Variable([[1.0, 2.0], [3.0, 4.0]], shape=[None, 2])
        model.known = [tf.Variable([1.0, 2.0]), tf.Variable(5.0)]
        return model

    replicas = replicate(ours, make)
    optimizer, *_ = make_sharded_optimizer(
        ours, lambda: tf.compat.v1.train.GradientDescentOptimizer(0.5), replicas
    )

    @tf.function(autograph=False)
    def step():
        grads = [
            [tf.ones_like(v) * (k + 1) for v in model.trainable_variables]
            for k, model in enumerate(replicas)
        ]
        apply_sharded_gradients(ours, grads, replicas, optimizer)

    step()
    for model in replicas:
        values = [v.numpy().tolist() for v in (model.rows, *model.known)]
        assert values == [[[0.25, 1.25], [2.25, 3.25]], [0.25, 1.25], 4.25]

"""Keras's layers with ``synchronized=True`` take the whole batch of all towers.

The oracle is one device on all rows, with the same layers.
"""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tw_core import map_towers, replicate, towers
from tw_core.synchronized import synchronized_layers
from tw_core.testing import CPUS, run_in_function, run_in_graph

X = np.random.default_rng(1).normal(3.0, 2.0, [12, 6, 6, 2])
Y = np.random.default_rng(2).normal(size=[12, 3])
SIZES = {"uneven, one empty": [7, 0, 5], "four": [1, 5, 2, 4]}
PARTS = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def ours(total):
    return towers(list(CPUS[:total]))


def make_model(lib=keras, synchronized=True):
    """Two normalised layers, one of them in a residual branch."""
    layers, dtype = lib.layers, "float64"
    options = {"momentum": 0.8, "synchronized": synchronized, "dtype": dtype}
    lib.utils.set_random_seed(5)
    image = lib.Input([6, 6, 2], dtype=dtype)
    hidden = layers.Conv2D(4, 3, dtype=dtype)(image)
    branch = layers.BatchNormalization(**options)(hidden)
    branch = layers.Activation("softplus", dtype=dtype)(branch)
    hidden = layers.Add(dtype=dtype)([hidden, branch])
    hidden = layers.Flatten(dtype=dtype)(hidden)
    hidden = layers.BatchNormalization(**options)(hidden)
    return lib.Model(image, layers.Dense(3, dtype=dtype)(hidden))


def loss_and_gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 12
    return loss, tape.gradient(loss, list(model.trainable_variables))


def moving_averages(model):
    return [v.numpy() for v in model.non_trainable_variables]


def on_one_device(model):
    return tf.function(loss_and_gradients)(model, tf.constant(X), tf.constant(Y))


def on_towers(models, sizes, around=synchronized_layers):
    @tf.function
    def step(x, y):
        with around():
            return map_towers(
                lambda _, *items: loss_and_gradients(*items),
                ours(len(sizes)),
                models,
                tf.split(x, sizes),
                tf.split(y, sizes),
            )

    losses, grads = zip(*step(X, Y), strict=True)
    return sum(losses), [np.sum(column, 0) for column in zip(*grads, strict=True)]


@pytest.mark.slow(by_day=True)
@PARTS
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lib", [keras, tf_keras])
def test_models_of_each_tower_train_as_one_device_does(lib, shared, sizes):
    one = make_model(lib)
    loss, grads = on_one_device(one)
    if shared:
        models = [make_model(lib)] * len(sizes)
    else:
        models = replicate(ours(len(sizes)), lambda _: make_model(lib))
    got_loss, got_grads = on_towers(models, sizes)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-10)
    for got, want in zip(got_grads, grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-9)
    for model in models * (not shared):
        for got, want in zip(moving_averages(model), moving_averages(one), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def test_towers_that_are_not_synchronised_take_their_own_rows():
    one = make_model()
    loss, _ = on_one_device(one)
    for around, layers in (nullcontext, True), (synchronized_layers, False):
        models = replicate(ours(2), lambda _, s=layers: make_model(synchronized=s))
        got_loss, _ = on_towers(models, [7, 5], around)
        assert abs(got_loss - loss) > 1e-4


@pytest.mark.parametrize("run", [run_in_graph, run_in_function])
@pytest.mark.parametrize("within", [False, True])
def test_what_asks_the_replica_context_gets_sums_and_means(run, within):
    """Around all towers, or in a part of each."""

    def in_sync(tower, x):
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == 2
        assert not tf.distribute.has_strategy()
        with pytest.raises(ValueError, match=r"supports SUM and MEAN; got 'max'"):
            context.all_reduce("max", x)
        mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, [x])
        return context.all_reduce("sum", x), *mean

    def tower_fn(tower, x):
        with synchronized_layers() if within else nullcontext():
            got = in_sync(tower, x)
        own = tf.distribute.get_replica_context()
        return *got, own.all_reduce("sum", x) if within else x

    def build(x):
        with nullcontext() if within else synchronized_layers():
            got = map_towers(tower_fn, ours(2), [x, 2 * x])
        assert tf.distribute.get_replica_context().num_replicas_in_sync == 1
        return got

    for times, (total, mean, own) in enumerate(run(build, X), start=1):
        np.testing.assert_allclose(total, 3 * X, rtol=1e-15)
        np.testing.assert_allclose(mean, 1.5 * X, rtol=1e-15)
        np.testing.assert_array_equal(own, times * X)


def test_an_optimizer_of_keras_adds_gradients_as_it_does_in_replicas():
    """As under a strategy; gradients that were summed before are applied outside."""
    models = replicate(
        ours(2),
        lambda _: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
    )
    optimizers = [keras.optimizers.SGD(1.0) for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    before = [v.numpy() for v in models[0].trainable_variables]

    def step():
        def tower_fn(tower, model, optimizer):
            grads = [
                tf.fill(v.shape, tower.index + 1.0) for v in model.trainable_variables
            ]
            optimizer.apply(grads, model.trainable_variables)
            return tf.constant(0)

        with synchronized_layers():
            return map_towers(tower_fn, ours(2), models, optimizers)

    tf.function(step, autograph=False)()
    for model in models:
        for old, new in zip(before, model.trainable_variables, strict=True):
            np.testing.assert_allclose(new.numpy(), old - 3, rtol=1e-6)


def test_variables_are_made_as_outside_of_the_context(graph):
    _, plain = map_towers(lambda _: tf.Variable(1.0), ours(2))
    with synchronized_layers():
        _, other = map_towers(lambda _: tf.Variable(1.0), ours(2))
    assert type(plain) is type(other)
    assert plain.device == other.device


def test_summaries_are_those_of_tower_0(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))

    @tf.function
    def step():
        def tower_fn(tower):
            with writer.as_default(step=0):
                return tf.summary.write(tower.name, 1.0)

        with synchronized_layers():
            return map_towers(tower_fn, ours(2))

    assert [bool(written) for written in step()] == [True, False]


def test_another_strategys_scope_is_refused():
    with (
        tf.Graph().as_default(),
        tf.distribute.OneDeviceStrategy("/cpu:0").scope(),
        synchronized_layers(),
        pytest.raises(RuntimeError, match="leave that strategy's scope first"),
    ):
        map_towers(lambda _: 1, ours(2))

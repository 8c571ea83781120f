"""Training on a ``DeviceBatch`` with models of ``tf.Module`` and Keras 3."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import replicate, towers
from tw_core.testing import CPUS
from tw_rlload import DeviceBatch, EpochFunction

v1 = tf.compat.v1
SPECS = {"x": tf.TensorSpec([None, 3]), "y": tf.TensorSpec([None])}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((48, 3)).astype(np.float32)
Y = RNG.standard_normal(48).astype(np.float32)


class Linear(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable([0.5, -1.0, 2.0])

    def __call__(self, x):
        return tf.linalg.matvec(x, self.w)


def module(tower):
    del tower
    return Linear()


def dense(tower):
    del tower
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(1_400, "tanh"),  # 4,200: above what reducers pack
        keras.layers.Dense(1),
    ]
    return keras.Sequential([*layers, keras.layers.Flatten()])


def squared(model, inputs):
    predicted = tf.reshape(model(inputs["x"]), [-1])
    return tf.reduce_mean(tf.square(predicted - inputs["y"]))


def make(factory=module, optimizer=None, *, devices=2, loss_fn=squared, **options):
    made = towers(list(CPUS[:devices]))
    batch = DeviceBatch(made, SPECS, max_per_device_batch_size=4, **options)
    models = replicate(made, factory)
    optimizers = [(optimizer or (lambda: keras.optimizers.SGD(0.1)))() for _ in made]
    function = EpochFunction(batch, loss_fn, models, optimizers)
    return batch, function, models, optimizers


def values(model):
    return [np.asarray(variable) for variable in model.trainable_variables]


def reference(factory, optimizer, *, steps):
    """One model, fed the rows of all towers at once, in eager mode."""
    model, opt = factory(None), optimizer()
    for rows in steps:
        with tf.GradientTape() as tape:
            loss = squared(model, {"x": X[rows], "y": Y[rows]})
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        if isinstance(opt, v1.train.Optimizer):  # knows no Keras variables
            variables = [
                v if isinstance(v, tf.Variable) else v.value for v in variables
            ]
        opt.apply_gradients(zip(grads, variables, strict=True))
    return values(model)


def steps_of(devices, epochs):
    size = len(X) // devices
    one = [
        np.concatenate([np.arange(4) + k * size + start for k in range(devices)])
        for start in range(0, size, 4)
    ]
    return one * epochs


@pytest.mark.parametrize("factory", [module, dense])
@pytest.mark.parametrize(
    ("optimizer", "reference_optimizer"),
    [
        (lambda: keras.optimizers.Adam(0.05), None),
        (lambda: v1.train.AdamOptimizer(0.05), None),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
            lambda: keras.optimizers.SGD(0.1),
        ),
    ],
    ids=["keras adam", "v1 adam", "keras loss scaling"],
)
def test_epochs_are_what_one_model_learns_from_the_towers_rows(
    factory, optimizer, reference_optimizer
):
    batch, function, models, _ = make(factory, optimizer)
    batch.load({"x": X, "y": Y})
    function.run_epochs(2)
    wanted = reference(factory, reference_optimizer or optimizer, steps=steps_of(2, 2))
    for model in models:
        for got, want in zip(values(model), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


class WithIdle(Linear):
    def __init__(self):
        super().__init__()
        self.idle = tf.Variable(3.0, name="idle")


class Recording(v1.train.GradientDescentOptimizer):
    """Notes the pairs that it is to apply."""

    def __init__(self):
        super().__init__(0.1)
        self.calls = []

    def apply_gradients(self, pairs, **options):
        self.calls.append([(grad is not None, v.name) for grad, v in pairs])
        return super().apply_gradients(pairs, **options)


def test_an_optimizer_that_computes_gradients_gets_none_for_what_no_tower_reaches():
    batch, function, models, optimizers = make(lambda tower: WithIdle(), Recording)
    batch.load([X, Y])
    function.run_epochs(1)
    for optimizer in optimizers:
        assert sorted(optimizer.calls[-1]) == [(False, "idle:0"), (True, "Variable:0")]
    wanted = reference(
        module, lambda: v1.train.GradientDescentOptimizer(0.1), steps=steps_of(2, 1)
    )
    np.testing.assert_allclose(models[1].w, wanted[0], rtol=1e-5)
    assert models[1].idle.numpy() == 3
    batch, function, models, _ = make(lambda tower: WithIdle())
    batch.load([X, Y])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Keras warns of gradients that are None
        function.run_epochs(1)
    assert models[0].idle.numpy() == 3


def test_a_single_model_may_be_shared_by_all_towers():
    made = towers(list(CPUS[:2]))
    batch = DeviceBatch(made, SPECS, max_per_device_batch_size=4)
    model, optimizer = Linear(), keras.optimizers.Adam(0.05)
    function = EpochFunction(batch, squared, [model], [optimizer])
    batch.load([X, Y])
    function.run_epochs(2)
    wanted = reference(
        module, lambda: keras.optimizers.Adam(0.05), steps=steps_of(2, 2)
    )
    np.testing.assert_allclose(values(model)[0], wanted[0], rtol=1e-5)
    assert int(optimizer.iterations) == 12


def test_steps_epochs_and_batches_of_all_sizes_need_one_trace():
    traces = []

    def counted(model, inputs):
        traces.append(inputs["x"].shape)
        return squared(model, inputs), {"rows": tf.size(inputs["y"])}

    batch, function, _, _ = make(loss_fn=counted, devices=1, num_buffers=2)
    for num_rows in (48, 13, 2):
        batch.load([X[:num_rows], Y[:num_rows]])
        function.run_epochs(1)
        function.run_epochs(2, "rows")
        got = function.optimize(0)
        assert got["loss"] == np.mean([tower["loss"] for tower in got["towers"]])
        assert got["rows"] == got["towers"][0]["rows"] == min(num_rows, 4)
    batch.load_next([X, Y])
    batch.use_next()
    function.run_epochs(1)
    assert [shape.as_list() for shape in traces] == [[None, 3]]


def test_batch_norm_statistics_are_updated_in_the_loop():
    def normed(tower):
        del tower
        norm = keras.layers.BatchNormalization(momentum=0.5)
        return keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(1)])

    def training(model, inputs):
        predicted = model(inputs["x"], training=True)[:, 0]
        return tf.reduce_mean(tf.square(predicted - inputs["y"]))

    batch, function, models, _ = make(normed, loss_fn=training)
    batch.load([X, Y])
    function.run_epochs(2)
    moving = np.asarray(models[0].layers[0].moving_mean)
    wanted = np.zeros(3)
    for start in [*range(0, 24, 4)] * 2:
        wanted = 0.5 * wanted + 0.5 * X[start : start + 4].mean(0)
    np.testing.assert_allclose(moving, wanted, rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_no_scalar_is_refused():
    for returned, message in (
        (lambda e: e, r"got \{'loss': '\(None,\)'\}"),
        (lambda e: (tf.reduce_mean(e), {"all": e}), r"got \{'all': '\(None,\)'\}"),
        (lambda e: 3.0, r"got \{'loss': 'float'\}"),
    ):

        def loss_fn(model, inputs, returned=returned):
            return returned(tf.square(model(inputs["x"]) - inputs["y"]))

        batch, function, _, _ = make(loss_fn=loss_fn, devices=1)
        batch.load([X, Y])
        with pytest.raises(ValueError, match=message):
            function.run_epochs(1)

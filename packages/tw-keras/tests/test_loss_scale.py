"""Scaled losses overflow over towers when they do on one device, and not before."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS, layers

from tw_keras import TowerModel

KINDS = ("replicated", "sharded", "parameter_server")
# So small that gradients of kernels, which a tower adds over its rows, do not overflow.
X = np.random.default_rng(0).uniform(0.01, 0.02, [9, 3]).astype("float32")
WEIGHTS = np.linspace(0.5, 1.5, 9).astype("float32")


@pytest.fixture(autouse=True)
def _float16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def linear(y_true, y_pred):
    return keras.ops.mean(y_pred, axis=-1)


class AddsItsMean(layers.Layer):
    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs))
        return inputs


class OwnStep(keras.Sequential):
    """Scales a loss with one optimizer, and applies with another."""

    scales_own = True

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.second = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))

    def train_step(self, data):
        x = data[0]
        own = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(self(x))
            scaled = self.optimizer.scale_loss(loss)
            more = self.second.scale_loss(loss) if self.scales_own else scaled
        self.optimizer.apply(tape.gradient(scaled, own), own)
        self.second.apply(tape.gradient(more, own), own)
        return {"loss": loss}


def made(last=(), kind=keras.Sequential, regularizer=None):
    keras.utils.set_random_seed(0)
    # What overflows is a row's gradient: of the scaled loss, times 7.
    return kind(
        [
            keras.Input([3]),
            layers.Dense(
                *(4, None, False, "ones"),
                kernel_regularizer=regularizer,
            ),
            *last,
            layers.Dense(1, None, False, keras.initializers.Constant(7)),
        ]
    )


def synchronised():
    own = {"center": False, "scale": False}
    return made([layers.BatchNormalization(synchronized=True, **own)])


def adding():
    model = made()
    model.add(AddsItsMean())
    return model


CASES = {
    "even": {"rows": 8},
    "uneven": {},
    "few": {"rows": 2},  # with more towers some have none
    "weighted": {"sample_weight": WEIGHTS},
    "means of weights": {
        "sample_weight": WEIGHTS,
        "loss": lambda: keras.losses.MeanAbsoluteError(
            reduction="mean_with_sample_weight"
        ),
    },
    "added": {"make": adding, "loss": lambda: None},
    "regularised": {"make": lambda: made(regularizer="l2")},
    "synchronised": {"make": synchronised},
    "synchronised, even": {"make": synchronised, "rows": 8},
    "two optimizers": {"make": lambda: made(kind=OwnStep)},
}


def scales_of(model, case, steps=5):
    """Trains; returns the scale after each step, and the weights in the end."""
    # Doubles with every update: the first that overflows tells how large gradients are.
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), dynamic_growth_steps=1
    )
    model.compile(optimizer, case.get("loss", lambda: linear)(), jit_compile=False)
    rows = case.get("rows", 9)
    weight = case.get("sample_weight")
    weight = {} if weight is None else {"sample_weight": weight[:rows]}
    scales = []
    for _ in range(steps):
        model.train_on_batch(X[:rows], X[:rows, :1], **weight)
        scales.append(float(np.asarray(model.optimizer.dynamic_scale)))
    return scales, model.get_weights()


@functools.cache
def on_one_device(name):
    case = CASES[name]
    return scales_of(case.get("make", made)(), case)


CELLS = [(case, "replicated", 4 if case == "few" else 3) for case in CASES]
CELLS += [("uneven", "sharded", 3), ("uneven", "parameter_server", 3)]
CELLS += [("even", "replicated", 1), ("even", "sharded", 4)]
CELLS += [("synchronised", "sharded", 2), ("weighted", "parameter_server", 2)]


@pytest.mark.slow(
    by_day=[
        *("uneven-sharded-3", "weighted-parameter_server-2", "few-replicated-4"),
        *("two optimizers-replicated-3", "synchronised-sharded-2"),
    ]
)
@pytest.mark.parametrize(("name", "variables", "num_towers"), CELLS)
def test_a_scaled_loss_overflows_when_it_does_on_one_device(
    name, variables, num_towers
):
    case = CASES[name]
    want, plain = on_one_device(name)
    make = case.get("make", made)
    many = TowerModel(make, CPUS[:num_towers], variables=variables)
    got, weights = scales_of(many, case)
    assert got == want
    assert want != sorted(want)  # A step has overflowed.
    for own, one in zip(weights, plain, strict=True):
        np.testing.assert_allclose(own, one, rtol=2e-3, atol=1e-4)


@pytest.mark.slow(by_day=["sharded"])
@pytest.mark.parametrize("variables", KINDS)
def test_a_fixed_scale_overflows_when_it_does_on_one_device(variables):
    def weights_of(model, factor):
        optimizer = keras.optimizers.SGD(0.01, loss_scale_factor=factor)
        model.compile(optimizer, linear, jit_compile=False, auto_scale_loss=False)
        model.train_on_batch(X, X[:, :1])
        return model.get_weights()

    for factor in (60_000.0, 100_000.0):  # the gradient of one of 9 rows: 7 / 9 of it
        many = TowerModel(made, CPUS[:3], variables=variables)
        # Of the first kernel, through whose gradient the overflow passes.
        got, want = weights_of(many, factor)[0], weights_of(made(), factor)[0]
        np.testing.assert_allclose(got, want, rtol=2e-3)
    assert not np.isfinite(want).any()


def test_gradients_of_a_loss_that_another_optimizer_scaled_are_refused():
    class Mixed(OwnStep):
        scales_own = False

    many = TowerModel(lambda: made(kind=Mixed), CPUS[:2])
    with pytest.raises(ValueError, match="of the optimizer that applies"):
        scales_of(many, {})

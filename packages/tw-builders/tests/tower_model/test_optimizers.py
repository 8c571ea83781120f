"""Every optimizer of Keras trains from one trace as where each tower is traced.

The graph optimizer is off: it rewrites sums over the towers of one graph, and so the
last bits of towers that are traced each.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers import CASES, KINDS, make, present, unknown_options
from tower_models import CPUS

from tw_builders import TowerModel

layers = keras.layers
RANDOM = np.random.default_rng(0)
ROWS = 24  # two batches of 10, and one of 4
WORDS = RANDOM.integers(0, 50, size=(ROWS, 3))
Y = RANDOM.normal(size=(ROWS, 2)).astype("float32")
BY_DAY = ["Adam amsgrad", "SGD nesterov", "RMSprop centered", "MultiOptimizer"]
BY_DAY += ["Adafactor gradient_accumulation_steps", "Muon", "Ftrl use_ema"]


@pytest.fixture(autouse=True)
def unoptimised():
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def sparse_and_dense():
    """Has sparse gradients, one that travels in a pack and one that travels alone."""
    return keras.Sequential(
        [
            keras.Input([3], dtype="int64"),
            layers.Embedding(50, 4, name="words"),
            layers.Flatten(),
            layers.Dense(400, "tanh", name="hidden"),
            layers.Dense(2, name="out"),
        ]
    )


def dense():
    return keras.Sequential(
        [
            keras.Input([3]),
            layers.Rescaling(0.02),
            layers.Dense(1_400, "tanh", name="hidden"),
            layers.Dense(2, name="out"),
        ]
    )


def trained(case, num_towers, trace):
    """Returns the history, the optimizer's state, and the weights of all towers."""

    def seeded():
        keras.utils.set_random_seed(1)
        # Keras divides no sparse gradients by a scale.
        return dense() if "loss_scale_factor" in case else sparse_and_dense()

    model = TowerModel(seeded, CPUS[:num_towers], trace=trace)
    model.compile(make(case), "mse", metrics=["mae"])
    options = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(WORDS, Y, **options).history
    state = [own.numpy() for own in model.optimizer.variables]
    return [history, state, *(tower.get_weights() for tower in model.towers)]


def check_same(one, other, tolerance=0.0):
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), one, other
    )


def rounding(train, result):
    """Returns how far two runs of the same training may be apart: mostly 0."""
    try:
        check_same(train(), result)
    except AssertionError:
        return 1e-6
    return 0.0


@pytest.mark.full(*(f"{case}-2" for case in present(*BY_DAY)), "LossScaleOptimizer-3")
@pytest.mark.parametrize(
    ("case", "num_towers"),
    [
        pytest.param(case, count, id=f"{case}-{count}")
        for count, cases in ((2, CASES), (3, KINDS))
        for case in cases
    ],
)
def test_one_trace_trains_as_a_trace_for_each_tower(case, num_towers):
    each = trained(case, num_towers, "each")
    once = trained(case, num_towers, "once")
    assert all(map(np.all, map(np.isfinite, tf.nest.flatten(each))))
    first, last = each[0]["loss"]
    assert first != last
    try:
        check_same(once, each)
    except AssertionError:
        bound = rounding(lambda: trained(case, num_towers, "each"), each)
        check_same(once, each, bound)


def test_no_option_of_an_optimizer_is_left_out():
    assert unknown_options() == []

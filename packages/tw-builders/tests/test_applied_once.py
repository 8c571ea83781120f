"""Optimizers that are alike are traced once, and the others each."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.keras_optimizers import CASES, make, present

import tw_builders
import tw_core
from tw_core.testing import CPUS

v1 = tf.compat.v1.train
SHAPES = [[3, 2], [4]]
KINDS = {
    "a schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
    "v1 momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
    "v1 Adam": lambda: v1.AdamOptimizer(0.1),
}


def of_towers(num_towers, kind=tf.Variable):
    return [
        [kind(tf.ones(s), name=f"words{n}") for n, s in enumerate(SHAPES)]
        for _ in range(num_towers)
    ]


def gradients(dense=False):
    random = np.random.default_rng(1)
    sparse = tf.IndexedSlices(
        tf.constant(random.normal(size=[2, 2]), tf.float32),
        tf.constant([0, 2]),
        tf.constant([3, 2]),
    )
    first = tf.convert_to_tensor(sparse) if dense else sparse
    return [first, tf.constant(random.normal(size=[4]), tf.float32)]


def trained(makers, dense=False, kind=tf.Variable):
    """Returns the functions that a step calls, and the variables after three steps."""
    ours, left = tw_core.towers(CPUS[: len(makers)]), iter(makers)
    variables = of_towers(len(makers), kind)
    optimizers = tw_builders.make_optimizers(ours, lambda: next(left)(), variables)

    @tf.function(autograph=False)
    def step(grads):
        tw_builders.apply_gradients(ours, [grads] * len(ours), variables, optimizers)

    for _ in range(3):
        step(gradients(dense))
    graph = step.get_concrete_function(gradients(dense)).graph
    calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    return [call.get_attr("f").name for call in calls], variables


@pytest.mark.parametrize("name", KINDS)
def test_optimizers_that_are_alike_are_traced_once(name):
    called, variables = trained([KINDS[name]] * 3)
    assert len(called) == 3 and len(set(called)) == 1
    _, (want,) = trained([KINDS[name]])
    for own in variables:
        for got, plain in zip(own, want, strict=True):
            np.testing.assert_allclose(got, plain, rtol=1e-6)


@pytest.mark.slow(
    by_day=[*present("Adafactor", "Muon nesterov", "MultiOptimizer", "Ftrl use_ema")]
)
@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_updates_as_where_each_is_traced(case, monkeypatch):
    # Keras divides no sparse gradients by a scale.
    given = [lambda: make(case)] * 3, "loss_scale_factor" in case, keras.Variable
    called, once = trained(*given)
    assert len(called) == 3 and len(set(called)) == 1
    monkeypatch.setattr("tw_builders._apply.are_alike", lambda optimizers: False)
    called, each = trained(*given)
    assert called == []
    for got, plain in zip(*map(tf.nest.flatten, (once, each)), strict=True):
        np.testing.assert_array_equal(got, plain)


def sgd(*arguments, **options):
    return lambda: keras.optimizers.SGD(*arguments, **options)


UNLIKE = {
    "class": [sgd(0.1), lambda: keras.optimizers.Adam(0.1)],
    "rate": [sgd(0.1), sgd(0.2)],
    "clipping": [sgd(0.1), sgd(0.1, clipvalue=0.01)],
    "function": [sgd(lambda: 0.1), sgd(lambda: 0.2)],
    "v1 rate": [lambda rate=rate: v1.MomentumOptimizer(rate, 0.9) for rate in (0.1, 1)],
}


@pytest.mark.parametrize("name", UNLIKE)
def test_optimizers_that_differ_are_traced_each(name):
    called, (one, other) = trained(UNLIKE[name])
    assert called == []
    assert not np.allclose(one[1], other[1])

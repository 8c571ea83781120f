"""TensorFlow's v1 optimizers fit the protocol, Keras's do not."""

import inspect

import keras
import pytest
import tensorflow as tf

from tw_core import OptimizerLike

v1 = tf.compat.v1.train
OPTIMIZERS = [
    v1.AdadeltaOptimizer(),
    v1.AdagradDAOptimizer(0.1, tf.Variable(0, dtype=tf.int64)),
    v1.AdagradOptimizer(0.1),
    v1.AdamOptimizer(),
    v1.FtrlOptimizer(0.1),
    v1.GradientDescentOptimizer(0.1),
    v1.MomentumOptimizer(0.1, 0.9),
    v1.ProximalAdagradOptimizer(0.1),
    v1.ProximalGradientDescentOptimizer(0.1),
    v1.RMSPropOptimizer(0.1),
]
METHODS = [
    "compute_gradients",
    "apply_gradients",
    "get_slot",
    "get_slot_names",
    "variables",
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_every_v1_optimizer_fits(optimizer):
    assert isinstance(optimizer, OptimizerLike)


@pytest.mark.parametrize("method", METHODS)
def test_a_v1_optimizer_takes_the_arguments_of_the_protocol(method):
    ours = inspect.signature(getattr(OptimizerLike, method)).parameters
    theirs = inspect.signature(getattr(v1.Optimizer, method)).parameters
    assert set(ours) <= set(theirs)
    assert all(theirs[name].default == ours[name].default for name in ours)


@pytest.mark.parametrize("method", METHODS)
def test_without_one_of_the_methods_nothing_fits(method):
    members = {name: lambda self: None for name in METHODS if name != method}
    assert not isinstance(type("Almost", (), members)(), OptimizerLike)


def test_a_keras_optimizer_does_not_fit():
    assert not isinstance(keras.optimizers.SGD(0.1), OptimizerLike)

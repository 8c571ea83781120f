"""AutoGraph converts users' loss functions and leaves the library alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import towers
from tw_core.testing import CPUS
from tw_rlload import (
    DeviceBatch,
    EpochFunction,
    LocalSyncParallelOptimizer,
    weighted_mean,
)

SPECS = {"x": tf.TensorSpec([None])}
ROWS = np.float32([-3, -1, 5, 7, 9])


class Weight(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(0.0)


@pytest.fixture
def statuses(monkeypatch):
    """What AutoGraph is at whenever ``weighted_mean`` divides."""
    seen, divide = [], tf.math.divide_no_nan

    def spy(a, b):
        seen.append(tf.__internal__.autograph.control_status_ctx().status.name)
        return divide(a, b)

    monkeypatch.setattr(tf.math, "divide_no_nan", spy)
    return seen


def test_a_loss_function_in_a_tf_function_may_branch_on_tensors(statuses):
    @tf.function
    def loss_fn(model, inputs, weights):
        mean = weighted_mean(inputs["x"], weights)
        if mean < 0:
            return -mean * model.w
        return mean * model.w

    batch = DeviceBatch(
        towers(list(CPUS[:1])), SPECS, max_per_device_batch_size=2, remainder="pad"
    )
    model, optimizer = Weight(), keras.optimizers.SGD(1.0)
    train = EpochFunction(batch, loss_fn, [model], [optimizer])
    batch.load([ROWS])
    train.run_epochs(1)
    assert model.w.numpy() == -(2 + 6 + 9)
    assert set(statuses) == {"DISABLED"}


@pytest.mark.parametrize("autograph", [True, False])
def test_what_cannot_be_traced_is_refused_and_the_batch_stays(autograph):
    batch = DeviceBatch(
        towers(list(CPUS[:1])), SPECS, max_per_device_batch_size=2, num_buffers=2
    )
    batch.load([ROWS])
    train = EpochFunction(
        batch,
        lambda model, inputs: model.w * tf.reduce_sum(inputs["x"]),
        *([Weight()], [keras.optimizers.SGD(1.0)]),
    )
    for call, message in (
        (lambda: batch.load([ROWS]), "DeviceBatch.load copies rows; use it"),
        (lambda: batch.load_next([ROWS]), "load_next copies rows; use"),
        (lambda: train.run_epochs(1), "EpochFunction returns arrays; use it"),
        (lambda: train.optimize(0), "EpochFunction returns arrays; use it"),
    ):
        with pytest.raises(RuntimeError, match=message):
            tf.function(lambda call=call: call(), autograph=autograph)()
    assert batch.report.rows_given == 5
    train.run_epochs(1)


def test_the_older_class_is_refused_outside_of_a_session_graph():
    @tf.function
    def build():
        LocalSyncParallelOptimizer(None, ["/cpu:0"], [], [], 4, None)

    for call in (build, build.python_function):
        with pytest.raises(
            RuntimeError, match=r"session graph; got .* In TensorFlow 2"
        ):
            call()

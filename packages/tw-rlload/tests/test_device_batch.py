"""A batch on the devices outside of graphs: what a load that fails leaves."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import towers
from tw_core.testing import CPUS
from tw_rlload import DeviceBatch, EpochFunction

SPECS = {"x": tf.TensorSpec([None, 3]), "y": tf.TensorSpec([None])}


class Line(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable([0.0, 0.0, 0.0])

    def loss(self, inputs):
        error = tf.linalg.matvec(inputs["x"], self.w) - inputs["y"]
        return tf.reduce_mean(tf.square(error))


def test_a_load_that_fails_half_way_is_freed_and_never_trained_on(monkeypatch):
    batch = DeviceBatch(towers(list(CPUS[:2])), SPECS, max_per_device_batch_size=4)
    model, written = Line(), []
    train = EpochFunction(batch, Line.loss, [model], [keras.optimizers.SGD(0.1)])
    columns = [np.ones((16, 3), np.float32), np.ones(16, np.float32)]
    batch.load(columns)
    kind = type(model.w)
    assign = kind.assign

    def failing(self, value, **options):
        if len(value):
            if len(written) == 3:
                raise tf.errors.ResourceExhaustedError(None, None, "out of memory")
            written.append(self)
        return assign(self, value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "assign", failing)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="out of memory"):
            batch.load(columns)
    assert [len(variable.numpy()) for variable in written] == [0, 0, 0]
    assert batch.report is None
    for call in (lambda: train.optimize(0), lambda: train.run_epochs(1)):
        with pytest.raises(RuntimeError, match="the last load failed halfway"):
            call()
    np.testing.assert_array_equal(model.w.numpy(), 0)
    batch.load(columns)
    train.run_epochs(1)
    assert model.w.numpy().all()

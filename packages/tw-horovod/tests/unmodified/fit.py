"""``model.fit`` with the callbacks; of Keras 2 where TF_USE_LEGACY_KERAS=1.

Arguments: the file of the batch, the folder for results, and kinds of optimizers.
"""

import os
import sys

import horovod.tensorflow as hvd_ops
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback

hvd.init()
keras = tf.keras
batch, out = np.load(sys.argv[1]), sys.argv[2]
rows, targets = batch["rows"][hvd.rank()], batch["targets"][hvd.rank()]


class Note(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.values, self.losses = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.values.append(self.model.get_weights()[0][:, 0])
        self.losses.append(logs["loss"])


def train(kind):
    start = keras.initializers.Constant(1.0 + hvd.rank())
    dense = keras.layers.Dense(
        1, use_bias=False, kernel_initializer=start, name="dense"
    )
    model = keras.Sequential([keras.layers.InputLayer([2]), dense])
    optimizers = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
    passes = 2 if kind == "passes" else 1
    optimizer = hvd.DistributedOptimizer(
        optimizers.SGD(0.1, momentum=0.5), backward_passes_per_step=passes
    )
    if kind == "scaled":
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=8)
    model.compile(optimizer, "mse")
    note = Note()
    model.fit(
        rows,
        targets,
        batch_size=len(rows),
        epochs=4 * passes,
        shuffle=False,
        verbose=0,
        callbacks=[
            BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1.0),
            note,
        ],
    )
    path = f"{out}/{hvd.rank()}.keras"
    model.save(path)
    loaded = hvd.load_model(path) if kind != "scaled" else model
    np.testing.assert_array_equal(loaded.get_weights()[0][:, 0], note.values[-1])
    if kind == "legacy":
        [velocity] = loaded.optimizer.get_weights()[1:]
        assert velocity.shape == (2, 1)
    if kind == "scaled":
        check_refusals(optimizers, optimizer)
    np.save(f"{out}/{kind}{hvd.rank()}.npy", note.values[passes - 1 :: passes])
    np.save(f"{out}/{kind}{hvd.rank()}_loss.npy", note.losses)


def is_refused(call, words):
    try:
        call()
    except ValueError as error:
        return words in str(error)
    return False


def check_refusals(optimizers, scaled):
    inner = hvd.DistributedOptimizer(optimizers.SGD(), backward_passes_per_step=2)
    assert is_refused(
        lambda: hvd.DistributedOptimizer(scaled),
        "pass keras.mixed_precision.LossScaleOptimizer(hvd.DistributedOptimizer(",
    )
    assert is_refused(
        lambda: inner.aggregate_gradients([]),
        "backward_passes_per_step above 1 cannot be inside a LossScaleOptimizer",
    )


for own_kind in sys.argv[3:]:
    train(own_kind)
if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
    whole = batch["rows"].reshape(-1, 2)
    normed = hvd_ops.SyncBatchNormalization()(rows, training=True)
    want = (rows - whole.mean(0)) / np.sqrt(whole.var(0) + 1e-3)
    np.testing.assert_allclose(normed, want, rtol=1e-4, atol=1e-5)

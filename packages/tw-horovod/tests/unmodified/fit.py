"""``model.fit`` with the callbacks; of Keras 2 where TF_USE_LEGACY_KERAS=1."""

import os
import sys

import horovod.tensorflow as hvd_ops
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback

hvd.init()
keras, kind = tf.keras, sys.argv[3]
batch, out = np.load(sys.argv[1]), sys.argv[2]
rows, targets = batch["rows"][hvd.rank()], batch["targets"][hvd.rank()]
start = keras.initializers.Constant(1.0 + hvd.rank())
dense = keras.layers.Dense(1, use_bias=False, kernel_initializer=start, name="dense")
# Keras 2 puts a loss scale around the optimizer by itself.
policy = "mixed_float16" if kind == "scaled" else "float32"
model = keras.Sequential([keras.layers.InputLayer([2]), dense])
optimizers = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
passes = 2 if kind == "passes" else 1
optimizer = hvd.DistributedOptimizer(
    optimizers.SGD(0.1, momentum=0.5), backward_passes_per_step=passes
)
if kind == "scaled":
    optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=8)
model.compile(optimizer, "mse")
values, losses = [], []


class Note(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        values.append(model.get_weights()[0][:, 0])
        losses.append(logs["loss"])


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
        Note(),
    ],
)
model.save(f"{out}/{hvd.rank()}.keras")
loaded = hvd.load_model(f"{out}/{hvd.rank()}.keras") if kind != "scaled" else model
np.testing.assert_array_equal(loaded.get_weights()[0][:, 0], values[-1])
if kind == "legacy":
    [velocity] = loaded.optimizer.get_weights()[1:]
    assert velocity.shape == (2, 1)


def is_refused(call, words):
    try:
        call()
    except ValueError as error:
        return words in str(error)
    return False


if kind == "scaled":
    inner = hvd.DistributedOptimizer(optimizers.SGD(), backward_passes_per_step=2)
    assert is_refused(
        lambda: hvd.DistributedOptimizer(optimizer),
        "pass keras.mixed_precision.LossScaleOptimizer(hvd.DistributedOptimizer(",
    )
    assert is_refused(
        lambda: inner.aggregate_gradients([]),
        "backward_passes_per_step above 1 cannot be inside a LossScaleOptimizer",
    )
if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
    whole = batch["rows"].reshape(-1, 2)
    normed = hvd_ops.SyncBatchNormalization()(rows, training=True)
    want = (rows - whole.mean(0)) / np.sqrt(whole.var(0) + 1e-3)
    np.testing.assert_allclose(normed, want, rtol=1e-4, atol=1e-5)
np.save(f"{out}/{hvd.rank()}.npy", values[passes - 1 :: passes])
np.save(f"{out}/loss{hvd.rank()}.npy", losses)

"""A ``MonitoredTrainingSession`` with hooks, as for TensorFlow 1."""

import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf
from horovod.tensorflow.mpi_ops import local_rank, rank

tf.disable_v2_behavior()
hvd.init()
assert local_rank() == rank()
batch, out = np.load(sys.argv[1]), sys.argv[2]
x, y = tf.placeholder(tf.float32, [None, 2]), tf.placeholder(tf.float32, [None])
w = tf.get_variable("w", initializer=tf.fill([2], 1.0 + hvd.rank()))
loss = tf.reduce_mean((tf.reduce_sum(x * w, 1) - y) ** 2)
optimizer = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(0.1, 0.5))
train_op = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=4)]
fed = {x: batch["rows"][hvd.rank()], y: batch["targets"][hvd.rank()]}
values = []


def read(step_context):
    return step_context.session.run(w)


with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    while not session.should_stop():
        session.run(train_op, fed)
        values.append(session.run_step_fn(read))
np.save(f"{out}/plain{hvd.rank()}.npy", values)

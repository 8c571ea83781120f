"""A loop of its own, as for Horovod with TensorFlow 2."""

import sys

import horovod
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
batch, out = np.load(sys.argv[1]), sys.argv[2]
rows, targets = batch["rows"][hvd.rank()], batch["targets"][hvd.rank()]
weights = tf.Variable(tf.fill([2], 1.0 + hvd.rank()))
speed = tf.Variable(tf.zeros([2]))


@tf.function
def step(is_first):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.linalg.matvec(rows, weights) - targets) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    if is_first:
        hvd.broadcast_variables([weights, speed], root_rank=0)
        # Horovod's programs take the first step with each rank's own weights.
        return loss
    [grad] = tape.gradient(loss, [weights])
    speed.assign(0.5 * speed + grad)
    weights.assign_sub(0.1 * speed)
    return loss


step(True)
values = []
for _ in range(4):
    step(False)
    values.append(weights.numpy())
assert horovod.__version__.startswith("0.28")
assert hvd.size() == 2 and not hvd.mpi_built() and not hvd.nccl_built()
np.save(f"{out}/plain{hvd.rank()}.npy", values)

"""A vector that is pulled towards the rows' mean, by the drop-in class in a session."""

import numpy as np
import tensorflow as tf

from tw_core import session_config
from tw_core.testing import CPUS, NUM_CPUS
from tw_rlload import LocalSyncParallelOptimizer

v1 = tf.compat.v1
X = np.arange(32, dtype=np.float32).reshape(16, 2) % 7


class Loss:
    """What ``build_graph`` returns: ``w`` is pulled towards the rows' mean."""

    def __init__(self, inputs, weights=None):
        self.inputs, self.weights = inputs, weights
        self.w = v1.get_variable("w", initializer=tf.zeros([2]))
        self.loss = tf.reduce_mean(tf.square(inputs[0] - self.w))

    def gradients(self, optimizer):
        return optimizer.compute_gradients(self.loss)


def descent(rate=0.5):
    return v1.train.GradientDescentOptimizer(rate)


def make(build=Loss, *, devices=2, optimizer=None, clipping=None, **options):
    x = v1.placeholder(tf.float32, [None, 2], "x")
    return LocalSyncParallelOptimizer(
        optimizer or descent(),
        list(CPUS[:devices]),
        [x],
        [],
        4,
        build,
        clipping,
        **options,
    )


def session():
    sess = v1.Session(config=session_config(num_cpus=NUM_CPUS))
    sess.run(v1.global_variables_initializer())
    return sess

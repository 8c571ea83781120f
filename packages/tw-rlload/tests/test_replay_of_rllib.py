"""Replays what RLlib's class did, recorded (``data/rllib_multi_gpu.npz``)."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tw_core import session_config
from tw_core.testing import CPUS, NUM_CPUS
from tw_rlload import LocalSyncParallelOptimizer

v1 = tf.compat.v1
TRACES = np.load(Path(__file__).parent / "data" / "rllib_multi_gpu.npz")

# case: number of rows or sequences given, clipping
FEED_FORWARD = {0: (20, None), 1: (21, None), 3: (20, 0.05)}
RECURRENT = {4: 7, 5: 7}
LENGTH = 3


class Loss:
    def __init__(self, loss, x):
        self._loss, self.x = loss, x

    def gradients(self, optimizer):
        return optimizer.compute_gradients(self._loss)

    def extra_compute_grad_fetches(self):
        return {"rows": self.x, "tower_loss": self._loss}


def feed_forward(inputs):
    x, y = inputs
    with v1.variable_scope("default/net"):
        w = v1.get_variable("w", initializer=tf.constant([[0.1], [-0.2], [0.3]]))
        b = v1.get_variable("b", initializer=tf.constant([0.0]))
    return Loss(tf.reduce_mean(tf.square((x @ w + b)[:, 0] - y)), x)


def recurrent(inputs):
    x, y, h, lengths = inputs
    with v1.variable_scope("default/rnn"):
        wx = v1.get_variable("wx", initializer=tf.constant([[0.1, 0.2], [-0.3, 0.4]]))
        wh = v1.get_variable("wh", initializer=tf.constant([[0.5, -0.1], [0.2, 0.3]]))
        wo = v1.get_variable("wo", initializer=tf.constant([[0.7], [-0.6]]))
    steps, predictions = tf.reshape(x, [-1, LENGTH, 2]), []
    for t in range(LENGTH):
        h = tf.tanh(steps[:, t] @ wx + h @ wh)
        predictions.append((h @ wo)[:, 0])
    mask = tf.sequence_mask(lengths, LENGTH, tf.float32)
    errors = tf.square(tf.stack(predictions, 1) - tf.reshape(y, [-1, LENGTH]))
    total = tf.maximum(tf.reduce_sum(mask), 1.0)
    return Loss(tf.reduce_sum(mask * errors) / total, x)


def feed_forward_case(case):
    n, clipping = FEED_FORWARD[case]
    random = np.random.RandomState(0)
    inputs = [random.randn(n, 3).astype("f"), random.randn(n).astype("f")]
    placeholders = [v1.placeholder(tf.float32, [None, 3], "x")]
    placeholders.append(v1.placeholder(tf.float32, [None], "y"))
    return feed_forward, placeholders, [], inputs, [], clipping


def recurrent_case(case):
    n = RECURRENT[case]
    random = np.random.RandomState(0)
    inputs = [random.randn(3 * n, 2).astype("f"), random.randn(3 * n).astype("f")]
    states = [random.randn(n, 2).astype("f"), (1 + np.arange(n) % 3).astype("i4")]
    placeholders = [v1.placeholder(tf.float32, [None, 2], "x")]
    placeholders.append(v1.placeholder(tf.float32, [None], "y"))
    rnn = [v1.placeholder(tf.float32, [None, 2], "h0")]
    rnn.append(v1.placeholder(tf.int32, [None], "lengths"))
    return recurrent, placeholders, rnn, inputs, states, None


def check_weights(sess, case, step):
    names = [name for name in TRACES if name.startswith(f"{case}/{step}/")]
    variables = {v.op.name: v for v in v1.global_variables()}
    for name in names:
        value = sess.run(variables[name.split("/", 2)[2]])
        np.testing.assert_allclose(value, TRACES[name], rtol=1e-6, atol=1e-6)
    assert names


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FEED_FORWARD, *RECURRENT])
def test_a_recorded_run_is_met_step_by_step_and_in_one_call(case):
    make = feed_forward_case if case in FEED_FORWARD else recurrent_case
    devices, maximum, _, per_device, step, length, loaded = TRACES[f"{case}/meta"]
    with tf.Graph().as_default():
        build, placeholders, rnn, inputs, states, clipping = make(case)
        optimizer = LocalSyncParallelOptimizer(
            *(v1.train.GradientDescentOptimizer(0.1), list(CPUS[:devices])),
            *(placeholders, rnn, int(maximum), build, clipping),
        )
        with v1.Session(config=session_config(num_cpus=NUM_CPUS)) as sess:
            sess.run(v1.global_variables_initializer())
            assert optimizer.load_data(sess, inputs, states) == per_device
            report = optimizer.report
            assert report.num_devices == devices
            assert report.rows_per_device_step == step
            assert report.sequence_length == length
            assert report.rows_loaded == optimizer.num_tuples_loaded == loaded
            assert list(report.batch_offsets) == list(range(0, per_device, step))

            check_steps(optimizer, sess, case)
            sess.run(v1.global_variables_initializer())
            steps = 2 * len(report.batch_offsets)
            losses = optimizer.run_epochs(sess, 2).tower_losses.reshape(steps, -1)
            recorded = [TRACES[f"{case}/loss{j}"] for j in range(steps)]
            np.testing.assert_allclose(losses, recorded, rtol=1e-6)
            check_weights(sess, case, steps - 1)
            assert f"{case}/loss{steps}" not in TRACES


def check_steps(optimizer, sess, case):
    for j, offset in enumerate([*optimizer.report.batch_offsets] * 2):
        got = optimizer.optimize(sess, offset)
        losses = [tower["tower_loss"] for tower in got["towers"]]
        np.testing.assert_allclose(losses, TRACES[f"{case}/loss{j}"], rtol=1e-6)
        if f"{case}/rows{j}" in TRACES:
            rows = np.concatenate([tower["rows"] for tower in got["towers"]])
            np.testing.assert_array_equal(rows.ravel(), TRACES[f"{case}/rows{j}"])
        check_weights(sess, case, j)

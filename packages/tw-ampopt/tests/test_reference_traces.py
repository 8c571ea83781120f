"""StyleGAN2's recorded runs, replayed."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tw_ampopt

v1 = tf.compat.v1
TRACES = Path(__file__).parent / "data" / "stylegan2_optimizer.npz"
ADAM = {"beta1": 0.0, "beta2": 0.99, "epsilon": 1e-8}
SCENARIOS = {
    "acc4_1dev": (4, 0.25, {"tf_optimizer": "tf.train.AdamOptimizer", **ADAM}),
    "acc4_2dev": (4, 0.25, {"tf_optimizer": "tf.train.AdamOptimizer", **ADAM}),
    "noacc_1dev": (
        None,
        0.0005,
        {"tf_optimizer": "tf.train.GradientDescentOptimizer"},
    ),
    "simpleadam_acc4_2dev": (4, 0.25, {"tf_optimizer": "tw_ampopt.SimpleAdam", **ADAM}),
}


def load(scenario):
    with np.load(TRACES) as traces:
        prefix = f"{scenario}/"
        return {
            name.removeprefix(prefix): traces[name]
            for name in traces.files
            if name.startswith(prefix)
        }


def add_tower(optimizer, device, trace):
    with tf.device(device):
        w, b = tf.Variable(trace["w0"]), tf.Variable(trace["b0"])
        x0 = v1.placeholder(tf.float32, [8])
        x1 = v1.placeholder(tf.float32, [4])
        loss = tf.reduce_sum(w * x0) + 0.5 * tf.reduce_sum(tf.square(b - x1))
    optimizer.register_gradients(loss, {"w": w, "b": b})
    return x0, x1, w, b


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_recorded_run_of_the_original_is_met(scenario):
    trace = load(scenario)
    multiplier, increment, arguments = SCENARIOS[scenario]
    steps, devices = trace["ls"].shape
    with tf.Graph().as_default() as graph:
        optimizer = tw_ampopt.Optimizer(
            learning_rate=0.01,
            minibatch_multiplier=multiplier,
            use_loss_scaling=True,
            loss_scaling_init=10.0,
            loss_scaling_inc=increment,
            loss_scaling_dec=1.0,
            **arguments,
        )
        towers = [add_tower(optimizer, f"/cpu:{k}", trace) for k in range(devices)]
        step = optimizer.apply_updates()
        log2 = [optimizer.get_loss_scaling_var(f"/cpu:{k}") for k in range(devices)]
        counts = [v for v in optimizer.variables() if "grad_acc_count" in v.name]
        variables = [tower[2:] for tower in towers]
        with v1.Session(graph=graph) as sess:
            sess.run(v1.global_variables_initializer())
            for s in range(steps):
                feeds = {}
                for k, (x0, x1, _, _) in enumerate(towers):
                    feeds |= {x0: trace["X0"][s, k], x1: trace["X1"][s, k]}
                sess.run(step, feeds)
                np.testing.assert_array_equal(sess.run(log2), trace["ls"][s])
                if multiplier:
                    assert sess.run(counts) == [trace["cnt"][s, 0]]
                got = sess.run(variables)
                for k in range(devices):
                    np.testing.assert_allclose(got[k][0], trace["w"][s, k], atol=1e-6)
                    np.testing.assert_allclose(got[k][1], trace["b"][s, k], atol=1e-6)

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
    "noacc_1dev": (None, 5e-4, {"tf_optimizer": "tf.train.GradientDescentOptimizer"}),
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


def add_losses(optimizer, w, b, x0, x1):
    """Registers the trace's loss in two parts, each of which reaches one variable."""
    optimizer.register_gradients(2.0 * tf.reduce_sum(w * x0), {"w": w, "b": b})
    optimizer.register_gradients(tf.reduce_sum(tf.square(b - x1)), {"w": w, "b": b})


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("lazily", [False, True], ids=["", "lazily"])
def test_a_recorded_run_of_the_original_is_met(scenario, lazily):
    """By one optimizer, or by a main one and that of lazy regularisation, in turn.

    Both share the slots and the scale; the number of rounds of a minibatch is fed.
    """
    trace = load(scenario)
    rounds, increment, arguments = SCENARIOS[scenario]
    steps, devices = trace["ls"].shape
    with tf.Graph().as_default() as graph:
        fed = v1.placeholder(tf.int32, []) if rounds and lazily else rounds
        arguments = {
            "learning_rate": 0.01,
            "minibatch_multiplier": fed,
            "use_loss_scaling": True,
            "loss_scaling_init": 10.0,
            "loss_scaling_inc": increment,
            "loss_scaling_dec": 1.0,
            **arguments,
        }
        main = tw_ampopt.Optimizer(**arguments)
        both = [main]
        if lazily:
            both.append(tw_ampopt.Optimizer(name="Reg", share=main, **arguments))
        towers = []
        for k in range(devices):
            with tf.device(f"/cpu:{k}"):
                variables = tf.Variable(trace["w0"]), tf.Variable(trace["b0"])
                inputs = v1.placeholder(tf.float32, [8]), v1.placeholder(tf.float32, 4)
                for optimizer in both:
                    add_losses(optimizer, *variables, *inputs)
            towers.append((*inputs, *variables))
        ops = [optimizer.apply_updates() for optimizer in both]
        log2 = [main.get_loss_scaling_var(f"/cpu:{k}") for k in range(devices)]
        counts = [v for v in main.variables() if "grad_acc_count" in v.name]
        with v1.Session(graph=graph) as sess:
            sess.run(v1.global_variables_initializer())
            for s in range(steps):
                # Of four groups of rounds the second is one of regularisation.
                group = s // (rounds or 1)
                feeds = {fed: rounds} if tf.is_tensor(fed) else {}
                for k, (x0, x1, _, _) in enumerate(towers):
                    feeds |= {x0: trace["X0"][s, k], x1: trace["X1"][s, k]}
                sess.run(ops[-1] if group % 4 == 1 else ops[0], feeds)
                if not lazily or (s + 1) % (rounds or 1) == 0:
                    np.testing.assert_array_equal(sess.run(log2), trace["ls"][s])
                if rounds and not lazily:
                    assert sess.run(counts) == [trace["cnt"][s, 0]]
                for k, tower in enumerate(towers):
                    w, b = sess.run(tower[2:])
                    np.testing.assert_allclose(w, trace["w"][s, k], atol=1e-6)
                    np.testing.assert_allclose(b, trace["b"][s, k], atol=1e-6)

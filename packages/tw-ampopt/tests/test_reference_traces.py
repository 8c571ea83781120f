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


def add_losses(optimizer, w, b, x0, x1):
    """Registers the trace's loss in two parts, each of which reaches one variable."""
    optimizer.register_gradients(2.0 * tf.reduce_sum(w * x0), {"w": w, "b": b})
    optimizer.register_gradients(tf.reduce_sum(tf.square(b - x1)), {"w": w, "b": b})


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_loop_of_stylegan2s_shape_meets_the_recorded_run(scenario):
    """Each group of the trace's steps is run by the main or the regularisation op.

    Both share the slots and the scale. A group is the rounds of one minibatch, whose
    number is fed.
    """
    trace = load(scenario)
    rounds, increment, arguments = SCENARIOS[scenario]
    steps, devices = trace["ls"].shape
    every = 3  # the interval of lazy regularisation
    with tf.Graph().as_default() as graph:
        fed = v1.placeholder(tf.int32, []) if rounds else None
        arguments = {
            "learning_rate": 0.01,
            "minibatch_multiplier": fed,
            "use_loss_scaling": True,
            "loss_scaling_init": 10.0,
            "loss_scaling_inc": increment,
            "loss_scaling_dec": 1.0,
            **arguments,
        }
        main = tw_ampopt.Optimizer(name="TrainG", **arguments)
        reg = tw_ampopt.Optimizer(name="TrainGReg", share=main, **arguments)
        towers = []
        for k in range(devices):
            with tf.device(f"/cpu:{k}"):
                variables = tf.Variable(trace["w0"]), tf.Variable(trace["b0"])
                inputs = v1.placeholder(tf.float32, [8]), v1.placeholder(tf.float32, 4)
                add_losses(main, *variables, *inputs)
                add_losses(reg, *variables, *inputs)
            towers.append((*inputs, *variables))
        train_op, reg_op = main.apply_updates(), reg.apply_updates()
        log2 = main.get_loss_scaling_var("/cpu:0")
        left = iter(range(steps))
        with v1.Session(graph=graph) as sess:
            sess.run(v1.global_variables_initializer())
            iteration = 0
            while (s := next(left, None)) is not None:
                ops = [train_op, reg_op] if iteration % every == 0 else [train_op]
                iteration += 1
                for op in ops:
                    for r in range(rounds or 1):
                        if r or op is reg_op:
                            s = next(left)
                        feeds = {} if fed is None else {fed: rounds}
                        for k, (x0, x1, _, _) in enumerate(towers):
                            feeds |= {x0: trace["X0"][s, k], x1: trace["X1"][s, k]}
                        sess.run(op, feeds)
                    assert sess.run(log2) == trace["ls"][s, 0]
                    for k, tower in enumerate(towers):
                        w, b = sess.run(tower[2:])
                        np.testing.assert_allclose(w, trace["w"][s, k], atol=1e-6)
                        np.testing.assert_allclose(b, trace["b"][s, k], atol=1e-6)

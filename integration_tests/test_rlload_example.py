"""The PPO example in its short form, and tw-rlload with tw-ampopt's optimizers."""

import sys
from importlib.util import find_spec
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from launching import run_forked, run_to_its_end

import tw_ampopt
import tw_core
import tw_rlload
from tw_core.testing import CPUS

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "ppo"

needs_gymnasium = pytest.mark.skipif(
    not (find_spec("gymnasium") and find_spec("matplotlib")),
    reason="the example needs gymnasium and matplotlib",
)


def run(out, *arguments, way=run_forked):
    """Runs the example in a process of its own, as users do."""
    command = [sys.executable, str(EXAMPLE / "train.py"), *arguments]
    return way([*command, "--out", str(out)], deadline_s=240)


def scores(output):
    """Reads the mean returns from what the example says."""
    lines = [line for line in output.splitlines() if "mean of the last" in line]
    return [float(line.split("episodes ")[1].split()[0]) for line in lines]


@needs_gymnasium
@pytest.mark.timeout(300)
def test_a_short_run_learns_and_draws_its_curve(tmp_path):
    short = ("cartpole", "--seeds", "1", "--steps", "25600")
    status, said = run(tmp_path, *short, way=run_to_its_end)
    assert status in (0, 1), said
    # A random policy keeps the pole up for about 22 steps.
    (score,) = scores(said)
    assert score > 100, said
    assert (tmp_path / "cartpole.png").stat().st_size > 5_000


@needs_gymnasium
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--towers", "0"], "--towers must be at least 1; got 0"),
        (["recurrent", "--towers", "32"], "the 16 sequences of a minibatch of recurre"),
        (["--steps", "-5"], "--steps must be at least 1; got -5"),
        (["--seeds", "1", "-1"], "--seeds must be 0 or more; got [1, -1]"),
    ],
)
def test_wrong_options_are_refused(tmp_path, arguments, says):
    status, said = run(tmp_path / "out", *arguments)
    assert status == 2
    assert says in said
    assert not (tmp_path / "out").exists()


@needs_gymnasium
@pytest.mark.timeout(300)
def test_a_short_recurrent_run_works_on_sequences(tmp_path):
    status, said = run(tmp_path, "recurrent", "--seeds", "1", "--steps", "10240")
    assert status in (0, 1), said
    (score,) = scores(said)
    assert score > 22, said


@needs_gymnasium
def test_an_unknown_task_is_refused_by_name(tmp_path):
    status, said = run(tmp_path, "pendulum")
    assert status == 2
    assert "unknown tasks ['pendulum']" in said


class Line:
    """A policy of tw-rlload: a line through points, as ``build_graph`` returns it."""

    def __init__(self, inputs):
        x, y = inputs
        self.w = tf.compat.v1.get_variable("w", initializer=tf.zeros([3]))
        self.loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, self.w) - y))

    def gradients(self, optimizer):
        return optimizer.compute_gradients(self.loss)


def points():
    x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    return x, (x @ [1, 2, 3]).astype(np.float32)


def learnt_in_a_session(optimizer):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as sess:
        columns = [v1.placeholder(tf.float32, [None, 3], "x")]
        columns.append(v1.placeholder(tf.float32, [None], "y"))
        trainer = tw_rlload.LocalSyncParallelOptimizer(
            optimizer(), ["/cpu:0"], columns, [], 8, Line
        )
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        sess.run(init)
        trainer.load_data(sess, [*points()], [])
        for offset in trainer.report.batch_offsets:
            trainer.optimize(sess, offset)
        trainer.run_epochs(sess, 3)
        return sess.run(trainer.get_common_loss().w)


@pytest.mark.parametrize("use_loss_scaling", [False, True])
def test_the_optimizer_of_tw_ampopt_drives_the_towers(use_loss_scaling):
    descent = tf.compat.v1.train.GradientDescentOptimizer
    got = learnt_in_a_session(
        lambda: tw_ampopt.Optimizer(
            tf_optimizer=descent,
            learning_rate=0.05,
            use_loss_scaling=use_loss_scaling,
        )
    )
    wanted = learnt_in_a_session(lambda: descent(0.05))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


class Weights(tf.Module):
    """A line through points, and a variable that the loss does not reach."""

    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.zeros([3]), name="w")
        self.idle = tf.Variable(4.0, name="idle")

    def __call__(self, x):
        return tf.linalg.matvec(x, self.w)


class Dense(keras.Model):
    """The same as a Keras model."""

    def __init__(self):
        super().__init__()
        self.line = keras.layers.Dense(1, kernel_initializer="zeros")
        self.unused = keras.layers.Dense(1)
        self.line.build((None, 3))
        self.unused.build((None, 3))
        self.built = True

    def call(self, x):
        return self.line(x)[:, 0]


def learnt_in_a_function(make_model, make_optimizer):
    specs = {"x": tf.TensorSpec([None, 3]), "y": tf.TensorSpec([None])}
    towers = tw_core.towers(CPUS[:2])
    batch = tw_rlload.DeviceBatch(towers, specs, max_per_device_batch_size=8)
    keras.utils.set_random_seed(0)
    models = tw_core.replicate(towers, lambda tower: make_model())

    def loss_fn(model, inputs):
        return tf.reduce_mean(tf.square(model(inputs["x"]) - inputs["y"]))

    optimizers = [make_optimizer(model.trainable_variables) for model in models]
    train = tw_rlload.EpochFunction(batch, loss_fn, models, optimizers)
    batch.load([*points()])
    train.run_epochs(3)
    return [[np.asarray(v) for v in model.trainable_variables] for model in models]


@pytest.mark.parametrize("make_model", [Weights, Dense])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_tower_optimizer_of_tw_ampopt_drives_a_function(make_model, scaled):
    descent = tf.compat.v1.train.GradientDescentOptimizer
    got = learnt_in_a_function(
        make_model,
        lambda variables: tw_ampopt.TowerOptimizer(
            variables,
            tf_optimizer=descent,
            learning_rate=0.05,
            loss_scale=tw_ampopt.DynamicLossScale() if scaled else None,
        ),
    )
    wanted = learnt_in_a_function(make_model, lambda variables: descent(0.05))
    for mine, theirs in zip(got, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)

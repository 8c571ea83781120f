"""Steps built in the branches and loops of a session graph."""

from functools import cache, partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tw_ampopt import DynamicLossScale, Optimizer, SimpleAdam, TowerOptimizer

v1 = tf.compat.v1
SHAPES = [(2, 2), (3,), (129, 130)]  # two in one buffer, one alone
STEPS = 4
KINDS = {
    "v1": "tf.train.AdamOptimizer",
    "legacy": tf_keras.optimizers.legacy.Adam,
    "keras": keras.optimizers.Adam,
    "simple": SimpleAdam,
}


def plainly(step):
    return step(), STEPS


def in_a_branch(step):
    now = v1.placeholder_with_default(True, [])
    return tf.cond(now, lambda: tf.group(step()), tf.no_op), STEPS


def in_a_branch_of_a_branch(step):
    now = v1.placeholder_with_default(True, [])
    inner = lambda: tf.cond(now, lambda: tf.group(step()), tf.no_op)  # noqa: E731
    return tf.cond(now, inner, tf.no_op), STEPS


def in_a_loop(step):
    def body(i):
        with tf.control_dependencies([step()]):
            return i + 1

    return tf.while_loop(lambda i: i < STEPS, body, [tf.constant(0)]), 1


def in_a_function(step):
    @tf.function(autograph=False)
    def call():
        with tf.control_dependencies([step()]):
            return tf.constant(0)

    return call(), STEPS


def registered(optimizer, variables):
    with tf.device("/cpu:0"):
        optimizer.register_gradients(loss_of(variables), variables)
    return optimizer.apply_updates()


def in_pairs(optimizer, variables):
    pairs = optimizer.compute_gradients(loss_of(variables), variables)
    return optimizer.apply_gradients(pairs)


def loss_of(variables):
    return 0.5 * tf.add_n([tf.reduce_sum(tf.square(v)) for v in variables])


def train(place, kind, build, multiplier):
    """Returns variables, the optimizer's state and statistics after the steps."""
    with tf.Graph().as_default(), v1.Session() as sess:
        with tf.device("/cpu:0"):
            variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
        optimizer = Optimizer(
            tf_optimizer=kind,
            learning_rate=0.1,
            loss_scale=DynamicLossScale(growth_interval=1),
            clip_by_global_norm=1e3,
            minibatch_multiplier=multiplier,
        )
        step, calls = place(lambda: build(optimizer, variables))
        read = optimizer.statistics()
        sess.run(v1.global_variables_initializer())
        for _ in range(calls):
            sess.run(step)
        trained = sess.run([variables, optimizer.variables(), read])
        with sess.as_default():
            optimizer.reset_optimizer_state()
        assert sess.run(read)["updates"] == 0
        return trained


trained_plainly = cache(partial(train, plainly))


@pytest.mark.parametrize(
    ("kind", "place", "build", "multiplier"),
    [
        # A function takes over no device, by which registered towers are read apart.
        ("v1", in_a_branch, registered, None),
        ("v1", in_a_loop, registered, 2),
        ("v1", in_a_branch_of_a_branch, registered, 2),
        ("v1", in_a_function, in_pairs, 2),
        ("legacy", in_a_loop, in_pairs, None),
        ("legacy", in_a_function, in_pairs, None),
        ("keras", in_a_branch_of_a_branch, in_pairs, None),
        ("keras", in_a_function, in_pairs, None),
        ("simple", in_a_branch, in_pairs, None),
        ("simple", in_a_loop, in_pairs, None),
    ],
)
def test_a_step_built_anywhere_trains_as_one_that_is_not(
    kind, place, build, multiplier
):
    arguments = (KINDS[kind], build, multiplier)
    want, got = trained_plainly(*arguments), train(place, *arguments)
    assert got[2] == want[2]
    assert got[2]["updates"] == STEPS // (multiplier or 1)
    for g, w in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


@pytest.mark.parametrize("place", [in_a_branch, in_a_loop])
def test_gradients_scaled_outside_are_unscaled_by_the_same_scale(place):
    with tf.Graph().as_default(), v1.Session() as sess:
        with tf.device("/cpu:0"):
            w = tf.Variable([4.0])
        optimizer = Optimizer(
            tf_optimizer="tf.train.GradientDescentOptimizer",
            learning_rate=1.0,
            loss_scale=DynamicLossScale(growth_interval=1),
        )
        with tf.device("/cpu:0"):
            optimizer.register_gradients(tf.reduce_sum(w), [w])
        step, calls = place(optimizer.apply_updates)
        sess.run(v1.global_variables_initializer())
        for _ in range(calls):
            sess.run(step)
        np.testing.assert_array_equal(sess.run(w), [0])


# Refused by name.


def test_gradients_of_a_finished_branch_are_not_looked_at():
    with tf.Graph().as_default():
        w = tf.Variable([1.0, 2.0], name="w")
        optimizer = Optimizer("T")
        in_a_branch(lambda: in_pairs(optimizer, [w]))
        with pytest.raises(
            ValueError,
            match=r"^Everything must .*got the gradient of w:0 in tower 0 of "
            r"another graph, .*or of a tf\.cond branch",
        ):
            optimizer.nonfinite_gradients()


def test_gradients_registered_in_a_branch_are_not_applied_outside_of_it():
    with tf.Graph().as_default():
        with tf.device("/cpu:0"):
            w = tf.Variable([1.0, 2.0], name="w")
        optimizer = Optimizer("T")

        def register():
            with tf.device("/cpu:0"):
                optimizer.register_gradients(loss_of([w]), [w])
            return tf.constant(0)

        tf.cond(tf.constant(True), register, lambda: tf.constant(0))
        with pytest.raises(ValueError, match=r"^Everything must .*of w:0 in tower"):
            optimizer.apply_updates()


CALLS = [
    lambda o, v: o.apply([tf.ones(2)]),
    lambda o, v: o.apply_gradients([(tf.ones(2), v)]),
    lambda o, v: o.compute_gradients(tf.constant(1.0)),
    lambda o, v: o.nonfinite_gradients([tf.ones(2)]),
    lambda o, v: o.statistics(),
    lambda o, v: o.copy_to_replicas(),
    lambda o, v: o.apply_loss_scaling(tf.constant(1.0)),
    lambda o, v: o.undo_loss_scaling(tf.constant(1.0)),
]


@pytest.mark.parametrize("place", [plainly, in_a_branch, in_a_loop, in_a_function])
def test_a_tower_optimizer_refuses_session_graphs(place):
    w = tf.Variable([1.0, 2.0])
    optimizer = TowerOptimizer([w], name="T")
    message = r"^TowerOptimizer works in a tf\.function .* got a session graph"
    for call in CALLS:
        with tf.Graph().as_default(), pytest.raises(RuntimeError, match=message):
            place(partial(call, optimizer, w))

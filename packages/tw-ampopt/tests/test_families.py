"""Every family of optimizers that can be wrapped, next to the plain optimizer."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tw_ampopt import (
    DynamicLossScale,
    Optimizer,
    SimpleAdam,
    TowerOptimizer,
)

v1 = tf.compat.v1
# Two small variables, one above what reducers pack (4,096 elements), and one above
# what buffers pack (16,384).
INITIAL = [
    np.float32([[1, -2], [3, 4]]),
    np.float32([0.5, 2]),
    np.ones((3, 2000), np.float32),
    np.ones((129, 130), np.float32),
]
RATE = 0.1

V1 = {
    "Adam": (v1.train.AdamOptimizer, {}),
    "Adadelta": (v1.train.AdadeltaOptimizer, {}),
    "Adagrad": (v1.train.AdagradOptimizer, {}),
    "Ftrl": (v1.train.FtrlOptimizer, {}),
    "GradientDescent": (v1.train.GradientDescentOptimizer, {}),
    "Momentum": (v1.train.MomentumOptimizer, {"momentum": 0.9}),
    "ProximalAdagrad": (v1.train.ProximalAdagradOptimizer, {}),
    "ProximalGradientDescent": (v1.train.ProximalGradientDescentOptimizer, {}),
    "RMSProp": (v1.train.RMSPropOptimizer, {}),
}
LEGACY = {
    "Adam": (tf_keras.optimizers.legacy.Adam, {}),
    "SGD": (tf_keras.optimizers.legacy.SGD, {"momentum": 0.9}),
    "RMSprop": (tf_keras.optimizers.legacy.RMSprop, {}),
}
KERAS = {
    "Adam": (keras.optimizers.Adam, {}),
    "SGD": (keras.optimizers.SGD, {"momentum": 0.9}),
    "Lion": (keras.optimizers.Lion, {}),
}
FAMILIES = {
    f"{family}-{name}": made
    for family, table in (("v1", V1), ("legacy", LEGACY), ("keras", KERAS))
    for name, made in table.items()
} | {"simple-Adam": (SimpleAdam, {})}
# One of each family, and the names of its slots.
ADAMS = {
    v1.train.AdamOptimizer: ["m", "v"],
    SimpleAdam: ["m", "v"],
    tf_keras.optimizers.legacy.Adam: ["m", "v"],
    keras.optimizers.Adam: ["momentum", "velocity"],
}
each_family = pytest.mark.parametrize("kind", ADAMS)
SMALL_GRADS = [
    [np.float32([[1, 2], [-3, 0.5]]), np.float32([0.25, -1])],
    [np.float32([[-1, 1], [2, 0.5]]), np.float32([1, -1])],
    [np.float32([[2, 1], [2, -0.5]]), np.float32([0, 3])],
]
GRADS = [
    [*small, *(np.full_like(v, step - 0.5) for v in INITIAL[2:])]
    for step, small in enumerate(SMALL_GRADS)
]


def plain(kind, **kwargs):
    """Runs the unwrapped optimizer eagerly, where all families are right."""
    kind = {SimpleAdam: v1.train.AdamOptimizer}.get(kind, kind)
    variables = [tf.Variable(v) for v in INITIAL]
    optimizer = kind(learning_rate=RATE, **kwargs)
    for grads in GRADS:
        pairs = zip(map(tf.constant, grads), variables, strict=True)
        optimizer.apply_gradients(list(pairs))
    return [v.numpy() for v in variables]


@pytest.mark.parametrize(
    ("name", "num_towers"),
    [(name, 2 if name.endswith("-Adam") else 1) for name in FAMILIES],
)
def test_updates_are_those_of_the_plain_optimizer_and_skips_change_nothing(
    make_trainer, name, num_towers
):
    kind, kwargs = FAMILIES[name]
    trainer = make_trainer(
        INITIAL,
        num_towers,
        tf_optimizer=kind,
        learning_rate=RATE,
        loss_scale=DynamicLossScale(),
        **kwargs,
    )
    for given in (GRADS[0], np.nan, GRADS[1], np.inf, -np.inf, GRADS[2]):
        is_good = isinstance(given, list)
        grads = given if is_good else [np.full_like(v, given) for v in INITIAL]
        # What is not finite is of the last tower alone.
        trainer.step(*[given if is_good else GRADS[0]] * (num_towers - 1), grads)
    for tower in trainer.values():
        for got, want in zip(tower, plain(kind, **kwargs), strict=True):
            rtol = 1e-5 if kind is SimpleAdam else 2e-6
            np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-6)
    assert trainer.statistics()["skipped_updates"] == 3


TABLES = [np.ones((6, 3), np.float32), np.ones((17_000, 1), np.float32), INITIAL[1]]


@each_family
def test_every_towers_slots_are_its_own_and_found_by_name(make_trainer, kind):
    trainer = make_trainer(INITIAL, 2, tf_optimizer=kind, learning_rate=RATE)
    trainer.step(GRADS[0], GRADS[1])
    optimizer = trainer.optimizer
    assert optimizer.get_slot_names() == ADAMS[kind]
    name = ADAMS[kind][0]
    slots = [optimizer.get_slot(tower[1], name) for tower in trainer.towers]
    assert slots[0] is not slots[1]
    mean = (GRADS[0][1] + GRADS[1][1]) / 2
    for k in range(2):
        np.testing.assert_allclose(trainer.slot(k, 1, name), 0.1 * mean, rtol=1e-5)
    assert optimizer.get_slot(trainer.towers[0][0], "no such slot") is None
    with trainer.graph.as_default() if trainer.mode == "graph" else nullcontext():
        stranger = tf.Variable([1.0, 2.0])
    assert optimizer.get_slot(stranger, name) is None


@pytest.mark.parametrize("name", ["v1-GradientDescent", "legacy-SGD", "keras-SGD"])
def test_a_fed_learning_rate_reaches_every_family(name):
    kind, _ = FAMILIES[name]
    with tf.Graph().as_default():
        rate = v1.placeholder(tf.float32, [])
        optimizer = Optimizer(
            tf_optimizer=lambda learning_rate: kind(learning_rate),
            learning_rate=rate,
            minibatch_multiplier=2,
        )
        with tf.device("/cpu:0"):
            w = tf.Variable([1.0, 2.0])
            optimizer.register_gradients(tf.reduce_sum(w), [w])
        step = optimizer.apply_updates()
        with v1.Session() as sess:
            sess.run(v1.global_variables_initializer())
            for value in (9.0, 0.5, 9.0, 0.25):
                sess.run(step, {rate: value})
            np.testing.assert_array_equal(sess.run(w), [0.25, 1.25])
            told = sess.run(optimizer.statistics(), {rate: 0.125})
        assert told["learning_rate"] == 0.125


@each_family
def test_a_schedule_and_master_copies_serve_every_family(make_trainer, kind):
    schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 1, 0.5)
    trainer = make_trainer(
        [v.astype(np.float16) for v in INITIAL],
        tf_optimizer=kind,
        learning_rate=schedule,
        master_copies=True,
    )
    for grads in GRADS:
        trainer.step(grads)
    variables, optimizer = (
        [tf.Variable(v) for v in INITIAL],
        keras.optimizers.Adam(schedule),
    )
    for grads in GRADS:
        optimizer.apply(list(map(tf.constant, grads)), variables)
    for got, want in zip(trainer.values()[0], variables, strict=True):
        np.testing.assert_allclose(got, want.numpy().astype(np.float16), rtol=2e-3)


def adafactor_step(make_variable):
    """Builds a step in a session graph, whose gradients are twice the variables."""
    optimizer = Optimizer("T", tf_optimizer=keras.optimizers.Adafactor)
    with tf.device("/cpu:0"):
        variables = [make_variable(v, name=f"v{n}") for n, v in enumerate(TABLES)]
        squares = [tf.reduce_sum(tf.square(v)) for v in variables]
        optimizer.register_gradients(tf.add_n(squares), variables)
    return optimizer.apply_updates(), variables


def test_adafactor_trains_keras_variables_in_a_session_graph_and_no_others():
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match=r"no names such as 'v0:0'\. Pass keras"),
    ):
        adafactor_step(tf.Variable)
    with tf.Graph().as_default(), v1.Session() as sess:
        step, variables = adafactor_step(keras.Variable)
        sess.run(v1.global_variables_initializer())
        sess.run(step)
        trained = sess.run([variable.value for variable in variables])
    plain = [tf.Variable(v) for v in TABLES]
    keras.optimizers.Adafactor().apply([2.0 * v for v in plain], plain)
    for got, want in zip(trained, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6)


def descent_with_a_growing_scale(w, kind="tf.train.GradientDescentOptimizer"):
    """Doubles its scale after every good update."""
    return TowerOptimizer(
        [w],
        tf_optimizer=kind,
        learning_rate=1.0,
        loss_scale=DynamicLossScale(growth_interval=1),
    )


@pytest.mark.parametrize("nested", [False, True])
def test_updates_in_one_call_each_see_the_scale_of_their_own(nested):
    """A nested function is traced for the first update alone."""
    w = tf.Variable([0.0])
    optimizer = descent_with_a_growing_scale(w)

    def update(scaled):
        return optimizer.apply([scaled])

    update = tf.function(update) if nested else update

    @tf.function
    def three(grad):
        scaled = []
        for _ in range(3):
            scaled.append(optimizer.apply_loss_scaling(grad))
            update(scaled[-1])
        return scaled

    scales = [s.numpy().item() for s in three(tf.constant([1.0]))]
    assert scales == [2.0**15, 2.0**16, 2.0**17]
    assert w.numpy() == [-3.0]
    assert optimizer.statistics()["loss_scaling_log2"] == 18


@pytest.mark.parametrize(
    "kind", ["tf.train.GradientDescentOptimizer", "keras.optimizers.SGD"]
)
def test_under_wrap_function_the_scale_is_read_once(kind):
    w = tf.Variable([0.0])
    optimizer = descent_with_a_growing_scale(w, kind)

    def step(grad):
        scaled = optimizer.apply_loss_scaling(grad)
        updated = optimizer.apply([scaled])
        with tf.control_dependencies([updated]):
            return optimizer.undo_loss_scaling(tf.identity(scaled)), updated

    wrapped = v1.wrap_function(step, [tf.TensorSpec([1])])
    for _ in range(2):
        grad, updated = wrapped(tf.constant([1.0]))
        assert updated and grad.numpy() == [1]
    assert not wrapped(tf.constant([np.nan]))[1]
    assert w.numpy() == [-2.0]

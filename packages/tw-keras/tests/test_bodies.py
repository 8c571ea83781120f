"""Steps that apply in a branch or in a function train as on one device.

Batches have as many rows in every tower, whose sums over several batches are then those
of one device.
"""

import itertools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS, check_near

from tw_keras import TowerModel
from tw_keras._meetings.meetings import Meetings
from tw_keras._meetings.step import Step

layers, optimizers = keras.layers, keras.optimizers
RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 9, size=(36, 3))
Y = RANDOM.normal(size=(36, 1)).astype("float32")
OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: optimizers.Adam(0.01, epsilon=1e-3),
}
WAYS = {
    "once": {},
    "not inlined": {"inline": False},
    "sharded": {"variables": "sharded"},
    "compiled by XLA": {"compile": {"jit_compile": True}},
    "eager": {"compile": {"run_eagerly": True}},
}


class Model(keras.Model):
    """Two players, sums of gradients, and a counter of batches."""

    def __init__(self, step, synchronized=False):
        super().__init__()
        self.step = step
        self.second = optimizers.RMSprop(0.01, epsilon=1e-2)
        self.one, self.two = self.player(synchronized), self.player(synchronized)
        self.seen = keras.metrics.Mean("seen")
        self.count = self.state(dtype="int64")
        self.sums = [self.state(v.shape) for v in self.one.trainable_variables]
        self.built = True

    @staticmethod
    def player(synchronized):
        norm = layers.BatchNormalization(synchronized=True)
        return keras.Sequential(
            [
                keras.Input([3], dtype="int64"),
                layers.Embedding(9, 4),
                layers.Flatten(),
                layers.Dense(3, "tanh"),
                *([norm] if synchronized else []),
                layers.Dense(1),
            ]
        )

    def state(self, shape=(), **options):
        return self.add_weight(
            shape=shape, initializer="zeros", trainable=False, **options
        )

    def call(self, x, training=None):
        return self.one(x, training=training)

    def grads(self, player, x, y, optimizer=None):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((player(x, training=True) - y) ** 2)
            scaled = (optimizer or self.optimizer).scale_loss(loss)
        return loss, tape.gradient(scaled, player.trainable_variables)

    def train_step(self, data):
        self.count.assign_add(1)
        loss = self.step(self, *data)
        return {"loss": loss, "seen": self.seen.result(), "count": self.count}

    @tf.function
    def method(self, x, y):
        if tf.reduce_sum(y) > 1e9:
            y = -y
        loss, grads = self.grads(self.one, x, y)
        self.optimizer.apply(grads, self.one.trainable_variables)
        return {"loss": loss}

    @tf.function
    def accumulated(self, x, y):
        loss = accumulate(self, x, y)
        if self.count % 2 == 0:
            apply_mean(self)
        return loss


def in_a_method(self, x, y):
    return self.method(x, y=y)["loss"]


def accumulate(self, x, y):
    loss, grads = self.grads(self.one, x, y)
    for own, grad in zip(self.sums, grads, strict=True):
        own.assign_add(tf.convert_to_tensor(grad))
    return loss


def apply_mean(self):
    self.optimizer.apply([own / 2 for own in self.sums], self.one.trainable_variables)
    for own in self.sums:
        own.assign(tf.zeros_like(own))


def accumulating(self, x, y):
    loss = accumulate(self, x, y)
    tf.cond(self.count % 2 == 0, lambda: apply_mean(self), lambda: None)
    return loss


def accumulating_by_autograph(self, x, y):
    return self.accumulated(x, y)


def in_turns(self, x, y):
    """Either branch differentiates, applies and counts."""

    def train(player, optimizer):
        loss, grads = self.grads(player, x, y, optimizer)
        optimizer.apply(grads, player.trainable_variables)
        self.seen.update_state(loss)
        return {"loss": loss, "none": None}, [tf.shape(x)[1]]

    results, _ = tf.cond(
        self.count % 2 == 0,
        lambda: train(self.one, self.optimizer),
        lambda: train(self.two, self.second),
    )
    return results["loss"] * 2


def nested(self, x, y):
    """Applies, two branches and a function deep, gradients from outside of them."""
    loss, grads = self.grads(self.one, x, y)
    variables = self.one.trainable_variables

    @tf.function
    def apply():
        self.optimizer.apply(grads, variables)
        return 1.0

    def inner():
        return tf.cond(self.count > 2, apply, lambda: 2.0)

    number = tf.cond(self.count % 2 == 0, lambda: 3.0, inner)
    return loss + number


STEPS = {
    "in a method": in_a_method,
    "accumulating": accumulating,
    "accumulating by AutoGraph": accumulating_by_autograph,
    "in turns": in_turns,
    "nested": nested,
}
CASES = [
    (name, way, ["SGD", "Adam"][n % 2], 2 + n % 3 % 2)
    for n, (name, way) in enumerate(itertools.product(STEPS, WAYS))
]


def made(step, **options):
    keras.utils.set_random_seed(1)
    return Model(STEPS[step] if isinstance(step, str) else step, **options)


def trained(model, optimizer, x=WORDS, y=Y, batch_size=12, **options):
    model.compile(OPTIMIZERS[optimizer](), **options)
    given = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    return [model.fit(x, y, **given).history, model.get_weights()]


@pytest.mark.slow(by_day=["accumulating-once"])
@pytest.mark.parametrize(
    ("step", "way", "optimizer", "num_towers"),
    [pytest.param(*case, id="-".join(case[:2])) for case in CASES],
)
def test_a_step_that_applies_in_a_body_trains_as_on_one_device(
    step, way, optimizer, num_towers
):
    options = dict(WAYS[way])
    of_compile = options.pop("compile", {})
    many = TowerModel(lambda: made(step), CPUS[:num_towers], **options)
    wanted = trained(made(step), optimizer)
    check_near(trained(many, optimizer, **of_compile), wanted)
    for tower in many.towers[1:]:  # which have other sums
        check_near(tower.one.get_weights(), many.towers[0].one.get_weights())


@pytest.mark.slow(by_day=["in turns"])
@pytest.mark.parametrize("step", ["in a method", "in turns"])
def test_layers_are_synchronised_in_bodies(step):
    def make():
        return made(step, synchronized=True)

    # The last batch of an epoch has two rows.
    wanted = trained(make(), "SGD", batch_size=17)
    many = trained(TowerModel(make, CPUS[:2]), "SGD", batch_size=17)
    # Two rows alone are divided by their small spread, which rounding changes.
    check_near(many, wanted, 3e-5)


@pytest.mark.slow
def test_towers_must_take_the_same_branch():
    def by_rows(self, x, y):
        loss, grads = self.grads(self.one, x, y)
        variables = self.one.trainable_variables
        tf.cond(
            tf.reduce_sum(y) > 0,
            lambda: self.optimizer.apply(grads, variables),
            lambda: None,
        )
        return loss

    model = TowerModel(lambda: made(by_rows), CPUS[:2])
    y = np.ones([36, 1], "float32")
    trained(model, "SGD", y=y)
    y[6:12] = -1
    message = "so all must take the same one; compute its predicate"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        trained(model, "SGD", y=y)


def test_other_bodies_are_refused():
    def in_a_loop(self, x, y):
        loss, grads = self.grads(self.one, x, y)

        def turn(n):
            self.optimizer.apply(grads, self.one.trainable_variables)
            return n + 1

        tf.while_loop(lambda n: n < 2, turn, [0])
        return loss

    def in_a_case(self, x, y):
        loss, grads = self.grads(self.one, x, y)
        variables = self.one.trainable_variables
        tf.switch_case(tf.constant(0), [lambda: self.optimizer.apply(grads, variables)])
        return loss

    for step in (in_a_loop, in_a_case):
        model = TowerModel(lambda step=step: made(step), CPUS[:2])
        with pytest.raises(RuntimeError, match="reached in the body of a branch, a l"):
            trained(model, "SGD")


def test_results_of_a_branch_that_applies_cannot_be_differentiated():
    def outside(self, x, y):
        with tf.GradientTape() as tape:
            loss = in_turns(self, x, y)
        tape.gradient(loss, self.one.trainable_variables)

    model = TowerModel(lambda: made(outside), CPUS[:2])
    with pytest.raises(RuntimeError, match="take the gradients inside the branch"):
        trained(model, "SGD")


def test_branches_are_refused_where_ranks_exchange_gradients():
    ranks = dict.fromkeys(("ranks", "ranks_in_steps"), object())
    main = Model(accumulating)
    optimizers = [main.second]
    copies = SimpleNamespace(main=main, memory=None, optimizers=optimizers, **ranks)
    meetings = Meetings(Step(copies=copies))
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="does not know the branch of another"),
    ):
        meetings.combine(("optimizer", 0), [([], [], [])])

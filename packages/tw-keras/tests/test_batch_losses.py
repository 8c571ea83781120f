"""Losses over the whole batch train as on one device, whose program is the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs.batch_losses import LABELS, OTHER, PROGRAMS, SimCLR, X, embedding
from tower_models import CPUS, check_near, seeded

from tw_core.synchronized import gather, sum_over_towers
from tw_keras import TowerModel

ADAM = keras.optimizers.Adam
WAYS = {
    "two": {},
    "three": {"towers": 3},
    "shared": {"variables": "parameter_server", "towers": 3},
    "sharded": {"variables": "sharded"},
    "steps": {"compile": {"steps_per_execution": 2}},
    "xla": {"compile": {"jit_compile": True}},
    "eager": {"compile": {"run_eagerly": True}},
    "accumulated": {"optimizer": lambda: ADAM(0.01, gradient_accumulation_steps=2)},
    "scaled": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(ADAM(0.01))},
}


def trained(name, towers, *, compile=None, optimizer=None, **options):
    make, loss, data = PROGRAMS[name]
    make = seeded(make)
    model = TowerModel(make, CPUS[:towers], **options) if towers else make()
    model.compile((optimizer or (lambda: ADAM(0.01)))(), loss, **(compile or {}))
    history = model.fit(*data, batch_size=10, epochs=2, shuffle=False, verbose=0)
    result = model.evaluate(*data, batch_size=10, verbose=0) if loss else 0.0
    return history.history["loss"], result, model.get_weights()


BY_DAY = [
    *("three-SimCLR", "two-of own rows", "scaled-CLIP", "xla-NNCLR"),
    *("shared-triplets", "sharded-VICReg", "accumulated-cosine"),
]


@pytest.mark.slow(by_day=BY_DAY)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_loss_over_the_batch_trains_as_on_one_device(name, way):
    way = dict(way)
    got = trained(name, way.pop("towers", 2), **way)
    alone = {key: way[key] for key in ("compile", "optimizer") if key in way}
    check_near(got, trained(name, 0, **alone))


@pytest.mark.slow(by_day=["10"])
@pytest.mark.parametrize("rows", [8, 10])
def test_even_and_uneven_parts_have_the_gradient_of_one_device(rows):
    """SGD, whose step is the gradient; with eight rows no loss needs a weight."""
    data = (X[:rows], OTHER[:rows])
    weights = []
    for towers in (0, 2, 3):
        make = seeded(SimCLR)
        model = TowerModel(make, CPUS[:towers]) if towers else make()
        model.compile(keras.optimizers.SGD(1.0))
        model.fit(data, batch_size=rows, verbose=0)
        weights.append(model.get_weights())
    check_near(weights[1:], [weights[0]] * 2, 1e-12)


def test_a_layer_predicts_with_the_rows_of_all_towers():
    class Ranks(keras.layers.Layer):
        """The number of rows of the batch that are below each."""

        def call(self, x):
            below = tf.cast(x[:, None, 0] > gather(x)[None, :, 0], tf.int32)
            return tf.reduce_sum(below, 1)

    model = TowerModel(lambda: keras.Sequential([Ranks(dtype="float64")]), CPUS[:3])
    found = model.predict(X, batch_size=11, verbose=0)
    want = [np.argsort(np.argsort(part[:, 0])) for part in np.split(X, 3)]
    np.testing.assert_array_equal(found, np.concatenate(want))
    # One row, so that two towers have only padding.
    np.testing.assert_array_equal(model.predict(X[:1], verbose=0), [0])


def stepping(step, **attributes):
    """Returns a function that makes a model with a ``train_step``."""

    class Stepping(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = embedding()
            for name, value in attributes.items():
                setattr(self, name, value)

        def call(self, x):
            return self.inner(x)

        def train_step(self, data):
            step(self, keras.utils.unpack_x_y_sample_weight(data)[0])
            return {"one": tf.constant(1.0)}

    return Stepping


def over_all(model, x):
    return tf.reduce_mean(tf.linalg.norm(gather(model(x)), axis=0))


def descend(model, loss_of, scale=None):
    with tf.GradientTape() as tape:
        loss = loss_of()
        loss = loss if scale is None else scale(loss)
    variables = model.inner.trainable_variables
    model.optimizer.apply(tape.gradient(loss, variables), variables)


def fit(step, rows=10, **options):
    model = TowerModel(stepping(step), CPUS[:3], **options)
    model.compile("sgd")
    model.fit(X[:rows], batch_size=rows, verbose=0)


def test_a_step_must_weight_losses_that_reach_other_towers():
    def unscaled(model, x):
        descend(model, lambda: over_all(model, x))

    with pytest.raises(ValueError, match=r"reaches other towers by .*scale_loss\(loss"):
        fit(unscaled)
    fit(unscaled, rows=9)  # equal parts

    def twice(model, x):
        with tf.GradientTape() as tape:
            first = model.optimizer.scale_loss(tf.reduce_mean(model(x)))
            loss = first + model.optimizer.scale_loss(over_all(model, x))
        variables = model.inner.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    with pytest.raises(ValueError, match="scale_loss before and after"):
        fit(twice)


def test_a_loss_that_reaches_no_tower_is_averaged_though_a_later_one_does():
    weights = []
    for towers in (0, 3):

        def step(model, x):
            descend(
                model, lambda: tf.reduce_mean(model(x) ** 2), model.optimizer.scale_loss
            )
            model.seen.assign(sum_over_towers(tf.reduce_sum(x)))

        make = stepping(step, seen=tf.Variable(0.0, trainable=False))
        model = TowerModel(seeded(make), CPUS[:towers]) if towers else seeded(make)()
        model.compile(keras.optimizers.SGD(0.5))
        model.fit(X[:10], batch_size=10, verbose=0)
        weights.append(model.get_weights())
    check_near(weights[1], weights[0], 1e-12)


def test_a_loss_of_all_rows_is_refused_where_losses_are_added():
    def whole(model, x):
        descend(model, lambda: over_all(model, x), model.optimizer.scale_loss)

    def of_own(model, x):
        def loss():
            z = model(x)
            return tf.reduce_sum(tf.matmul(z, gather(z), transpose_b=True) ** 2)

        descend(model, loss, model.optimizer.scale_loss)

    with pytest.raises(ValueError, match=r"leave out loss_reduction='sum'"):
        fit(whole, loss_reduction="sum")
    fit(of_own, loss_reduction="sum")


def test_labels_are_gathered_with_their_rows():
    """Of each row the number of others with its label, as a metric sees it."""

    def loss(labels, predicted):
        every = gather(labels)
        same = tf.equal(labels[:, :1], tf.transpose(every[:, :1]))
        count = tf.reduce_sum(tf.cast(same, predicted.dtype), 1)
        return count + 0 * predicted[:, 0]

    model = TowerModel(embedding, CPUS[:3])
    model.compile("sgd", loss)
    found = model.evaluate(X[:10], LABELS[:10, None], verbose=0)
    assert found == pytest.approx((4 * 4 + 3 * 3 + 3 * 3) / 10)


@pytest.mark.slow
def test_a_program_for_mirrored_strategy_gathers_as_there():
    """With twice its rate, as ``fit`` there adds the gradients of all replicas."""

    def loss(labels, embedded):
        context = tf.distribute.get_replica_context()
        if context is None:  # Keras learns the shapes of the model, in no replica.
            return tf.reduce_mean(embedded)
        z = context.all_gather(tf.nn.l2_normalize(embedded, 1), axis=0)
        labels = context.all_gather(tf.reshape(labels, [-1]), axis=0)
        same = tf.cast(tf.equal(labels[:, None], labels[None]), z.dtype)
        return tf.reduce_mean((tf.matmul(z, z, transpose_b=True) - same) ** 2)

    def weights(make, rate=0.1):
        model = make()
        model.compile(keras.optimizers.SGD(rate), loss)
        options = {"batch_size": 10, "shuffle": False, "verbose": 0}
        model.fit(X[:30], LABELS[:30], epochs=2, **options)
        return model.get_weights()

    strategy = tf.distribute.MirroredStrategy(CPUS[:2])
    with strategy.scope():
        theirs = weights(seeded(embedding), 0.05)
    check_near(weights(lambda: TowerModel(seeded(embedding), CPUS[:2])), theirs, 1e-7)
    check_near(weights(seeded(embedding)), theirs, 1e-7)

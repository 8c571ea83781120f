"""State that a step writes, wherever a model holds it, is that of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS, check_near, towers_of

from tw_keras import TowerModel

layers, optimizers = keras.layers, keras.optimizers
MODES = ("replicated", "sharded", "parameter_server")
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 4)).astype("float32")
Y = X[:, :1] * 0.5 + 0.1


def variable():
    return tf.Variable(0.5, trainable=False)


class Module(tf.Module):
    """Holds whatever it is given."""

    def __init__(self, held):
        super().__init__()
        self.held = held


class Layer(layers.Layer):
    """Has a weight that does not train, and an attribute that Keras does not list."""

    def build(self, shape):
        options = {"trainable": False, "initializer": keras.initializers.Constant(0.5)}
        self.weight = self.add_weight(shape=(), **options)
        self.own = variable()

    def call(self, x):
        return x


def set_attribute(model, value):
    model.attribute = value


# How a model holds a variable: what makes it, and what finds it.
WAYS = {
    "attribute": (lambda m, _: set_attribute(m, variable()), lambda m: m.attribute),
    "trainable": (
        lambda m, _: set_attribute(m, tf.Variable(0.5)),
        lambda m: m.attribute,
    ),
    "list": (
        lambda m, _: set_attribute(m, [1, [variable(), variable()]]),
        lambda m: m.attribute[1][1],
    ),
    "dict": (
        lambda m, _: set_attribute(m, {"b": variable(), "a": [variable()]}),
        lambda m: m.attribute["a"][0],
    ),
    "module": (
        lambda m, _: set_attribute(m, Module([Module({"a": variable()})])),
        lambda m: m.attribute.held[0].held["a"],
    ),
    "Keras's, in a module": (
        lambda m, _: set_attribute(m, Module(keras.Variable(0.5, trainable=False))),
        lambda m: m.attribute.held,
    ),
    "layer": (lambda m, _: None, lambda m: m.layers[0].own),
    "weight": (lambda m, _: None, lambda m: m.layers[0].weight),
    "outside": (lambda m, outside: None, None),
    "outside, as an attribute": (set_attribute, lambda m: m.attribute),
}


def counted(own):
    own.assign_add(1.0)
    return tf.sin(own + 0.0)


def read_before(own):
    old = own + 0.0
    own.assign(0.9 * own + 1.0)
    return tf.sin(old)


def read_before_and_after(own):
    old = own + 0.0
    own.assign_add(0.1 * old + 1.0)
    return tf.sin(old) * tf.cos(own + 0.0)


def in_a_branch(own):
    tf.cond(own < 3.0, lambda: own.assign(own + 1.0), lambda: own.assign(0.0 * own))
    return tf.sin(own + 0.0)


def in_a_function(own):
    @tf.function
    def run():
        own.assign(own + 1.0)
        return tf.sin(own + 0.0)

    return run()


def only_read(own):
    return tf.sin(own + 0.0)


EARLY = [counted, read_before, read_before_and_after, only_read]
EARLY += [in_a_branch, in_a_function]


class Program(keras.Sequential):
    """Holds a variable, which it writes before and after it applies."""

    def train_step(self, data):
        x, y = data
        own = self.found[0](self)
        factor = 1.0 + 0.3 * self.early[0](own)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2) * factor
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        if self.late[0]:  # an average of weights
            own.assign(0.5 * own + 0.1 * tf.reduce_sum(variables[0] ** 2))
        return {"loss": loss, "state": own + 0.0}


def trained(way, early, late, **towers):
    """Trains; returns the history, the weights and the state of all towers."""
    outside = variable()

    def make():
        keras.utils.set_random_seed(1)
        model = Program([keras.Input([4]), Layer(), layers.Dense(1)])
        WAYS[way][0](model, outside)
        model.found = [WAYS[way][1] or (lambda _: outside)]
        model.early, model.late = [early], [late]
        return model

    model = TowerModel(make, **towers) if towers else make()
    model.compile(optimizers.SGD(0.1, momentum=0.9))
    given = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, **given).history
    copies = getattr(model, "towers", [model])
    state = [float(own.found[0](own).numpy()) for own in copies]
    return [history, model.get_weights(), state[0]], state


@pytest.mark.slow(by_day=[*map(str, (0, 6, 13, 22))])
@pytest.mark.parametrize("seed", range(48))
def test_random_programs_hold_state_as_on_one_device(seed):
    random = np.random.default_rng(seed)
    way = list(WAYS)[seed % len(WAYS)]
    early, late = EARLY[random.integers(len(EARLY))], bool(random.integers(2))
    one, _ = trained(way, early, late)
    devices = CPUS[: 1 + seed % 4]
    many, state = trained(way, early, late, devices=devices, variables=MODES[seed % 3])
    check_near(many, one)
    assert len(set(state)) == 1


class InitialisedByItsFirstBatch(layers.Layer):
    """Normalises by what the first batch has, and trains that, as ActNorm does."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")
        self.known = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=None):
        if training:
            first = tf.math.reciprocal(tf.math.reduce_std(x, axis=0) + 0.1)
            is_known = tf.convert_to_tensor(self.known) > 0
            self.scale.assign(tf.where(is_known, self.scale, first))
            self.known.assign(1.0)
        return x * self.scale


class LooksAtCopies(keras.callbacks.Callback):
    """Compares what trains in all towers after every step."""

    def __init__(self, towers):
        super().__init__()
        self.towers, self.seen = towers, []

    def on_train_batch_end(self, batch, logs=None):
        values = [[np.array(v) for v in t.trainable_variables] for t in self.towers]
        self.seen += [len({str(own) for own in values})]


def fitted(model, loss="mse", **options):
    model.compile(optimizers.SGD(0.05, momentum=0.9), loss)
    given = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return model.fit(X * np.linspace(0.5, 4, 24)[:, None], Y, **given).history


@pytest.mark.parametrize("num_towers", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_weights_that_a_step_assigns_are_equal_in_all_towers(mode, num_towers):
    def make():
        dense = layers.SpectralNormalization(layers.Dense(1))
        return keras.Sequential([keras.Input([4]), InitialisedByItsFirstBatch(), dense])

    many = towers_of(make, num_towers, variables=mode)
    # A callback of one's own that looks after batches has towers follow: none here.
    look = LooksAtCopies(many.towers)
    seen = keras.callbacks.CallbackList([look], model=many, add_history=True)
    many.compile(optimizers.SGD(0.0), "mse")
    many.fit(X, Y, batch_size=12, epochs=2, verbose=0, callbacks=seen, shuffle=False)
    assert look.seen == [1] * 4
    # Tower 0's part of the first batch is what counts.
    first = 1 / (X[: 12 // num_towers].std(axis=0) + 0.1)
    np.testing.assert_allclose(many.layers[0].scale, first, 1e-5)


def recurrent(rows):
    return keras.Sequential(
        [
            keras.Input(batch_shape=(rows, 3, 2)),
            layers.Bidirectional(layers.LSTM(2, stateful=True)),
            layers.Dense(1),
        ]
    )


class Resets(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            self.model.layers[0].reset_state()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_towers", [1, 3])
@pytest.mark.slow
def test_states_of_rows_stay_with_their_rows(mode, num_towers):
    series = RANDOM.normal(size=(24, 3, 2)).astype("float32")
    results = []
    for model in (
        towers_of(lambda: recurrent(6), 1),
        towers_of(lambda: recurrent(6 // num_towers), num_towers, variables=mode),
    ):
        model.compile("sgd", "mse")
        given = {"batch_size": 6, "epochs": 4, "shuffle": False, "verbose": 0}
        history = model.fit(series, Y, callbacks=[Resets()], **given).history
        results.append([history, model.evaluate(series, Y, batch_size=6, verbose=0)])
    check_near(*results)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_teacher_outside_of_the_model_follows_once(mode, rate):
    def train(**options):
        keras.utils.set_random_seed(1)
        drops = [layers.Dropout(rate)] if rate else []
        teacher = keras.Sequential([keras.Input([4]), *drops, layers.Dense(1)])

        class Taught(keras.Sequential):
            """Learns from a teacher that follows it, and that Keras does not list."""

            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    taught = tf.reduce_mean((self(x) - teacher(x, training=True)) ** 2)
                    loss = tf.reduce_mean((self(x) - y) ** 2) + 0.3 * taught
                variables = self.trainable_variables
                self.optimizer.apply(tape.gradient(loss, variables), variables)
                for own, new in zip(
                    teacher.trainable_variables, variables, strict=True
                ):
                    own.assign(0.9 * own + 0.1 * new)
                return {"error": loss}

        def make():
            keras.utils.set_random_seed(2)
            return Taught([keras.Input([4]), layers.Dense(1)])

        model = TowerModel(make, **options) if options else make()
        history = fitted(model, loss=None)
        return [history, teacher.get_weights()], teacher

    many, teacher = train(devices=CPUS[:3], variables=mode)
    if rate:  # The towers draw masks in turn, from one generator.
        seeds = [v for v in teacher.variables if "seed" in v.path]
        assert [int(v[1]) for v in map(np.array, seeds)] == [3 * 4]
    else:
        check_near(many, train()[0])


def test_what_towers_would_write_unlike_is_refused_by_name_and_line():
    total = tf.Variable(0.0, name="total")
    loss = tf.Variable(0.0, name="mean_loss")

    class Counts(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            total.assign_add(tf.reduce_sum(data[1]))
            loss.assign(0.9 * loss + 0.1 * logs["loss"])  # a metric: of all rows
            return logs

    def make():
        return Counts([keras.Input([4]), layers.Dense(1)])

    line = Counts.train_step.__code__.co_firstlineno + 2
    says = rf"'total:0' \(.*test_state.py:{line}\).*outside of the towers' models"
    with pytest.raises(ValueError, match=says) as caught:
        fitted(towers_of(make, 2))
    assert "mean_loss" not in str(caught.value)
    assert "trace=" not in str(caught.value)
    fitted(towers_of(make, 1))  # which is one device
    np.testing.assert_allclose(total, 2 * Y.sum(), 1e-5)


def test_advice_is_for_users_of_the_model():
    class Drops(keras.Sequential):
        def train_step(self, data):
            x, y = data
            x = tf.cond(
                tf.reduce_sum(x) > 0, lambda: tf.nn.dropout(x, 0.5, seed=1), lambda: x
            )
            return super().train_step((x, y))

    model = towers_of(lambda: Drops([keras.Input([4]), layers.Dense(1)]), 2)
    with pytest.raises(ValueError, match="have a seed, inside a tf") as caught:
        fitted(model)
    assert str(caught.value).endswith("SeedGenerator per copy.")

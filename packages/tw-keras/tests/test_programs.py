"""Programs of the kinds that Keras's and TensorFlow's guides show, over towers.

Each is trained on one device and over towers; a program in which a tower's part of a
batch matters by itself is compared with towers whose gradients are averaged by hand.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import STEPS, check_near, seeded, towers_of

layers, optimizers = keras.layers, keras.optimizers
RANDOM = np.random.default_rng(0)
ROWS = 36  # three batches of 10, and one of 6
X = RANDOM.normal(size=(ROWS, 4)).astype("float32")
Y = X[:, :1] * 0.5 + 0.1
IMAGES = RANDOM.normal(size=(ROWS, 6, 6, 2)).astype("float32")
WORDS = RANDOM.integers(0, 9, size=(ROWS, 5))


def sequential(*inner, shape=(4,), out=1, dtype=None):
    def make():
        last = [] if out is None else [layers.Dense(out)]
        return keras.Sequential(
            [keras.Input(shape, dtype=dtype), *(make() for make in inner), *last]
        )

    return make


def dense(units=3, activation="tanh", **options):
    return lambda: layers.Dense(units, activation, **options)


def of(kind, *arguments, **options):
    return lambda: kind(*arguments, **options)


def of_words(*inner, **options):
    embedding = of(layers.Embedding, 9, 4)
    return sequential(embedding, *inner, shape=(5,), dtype="int64", **options)


class Layer(layers.Layer):
    """A layer that computes a function of its input, a kernel and a counter."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4), initializer="glorot_normal")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return self.function(x, tf.convert_to_tensor(self.kernel), self.count.value)


def computing(function):
    return {"make": sequential(of(Layer, function))}


def scan(x, kernel, count):
    return tf.scan(lambda y, row: tf.tanh(row @ kernel + y), x[:, None], x[:1])[:, 0]


@tf.custom_gradient
def halved_gradient(x):
    return x, lambda upstream: upstream / 2


class TwoOptimizers(keras.Model):
    """Applies with two through one tape, the second after the first has updated."""

    def __init__(self, make=None):
        super().__init__()
        self.inner = (make or sequential(dense()))()
        self.second = optimizers.RMSprop(0.01, epsilon=1e-2)
        self.tracker = keras.metrics.Mean("tracked")

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self.inner(x, training=True) - y) ** 2)
        first, rest = (self.inner.layers[n].trainable_variables for n in (-1, 0))
        self.optimizer.apply(tape.gradient(loss, first), first)
        self.second.apply_gradients(zip(tape.gradient(loss, rest), rest, strict=True))
        self.tracker.update_state(loss, sample_weight=tf.shape(y)[0])
        return {"loss": loss, "tracked": self.tracker.result()}


class OwnMethods(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = sequential(dense())()

    def call(self, x):
        y = self.inner(x)
        self.add_loss(0.1 * tf.reduce_mean(y**2))
        return y

    def test_step(self, data):
        return {**super().test_step(data), "mean": tf.reduce_mean(data[0])}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"y": super().predict_step(data), "twice": [2 * x]}


class MedianError(keras.metrics.Metric):
    """No sum of the towers' medians is the median of all rows."""

    def __init__(self, **options):
        super().__init__(name="median", **options)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.median(keras.ops.abs(y_true - y_pred)))

    def result(self):
        return self.total * 1


def of_any_length():
    """Batches of sequences that are longer each time."""
    for n in range(3, 6):
        yield WORDS[:7, :n], Y[:7]


def batches():
    spec = (tf.TensorSpec([None, None], "int64"), tf.TensorSpec([None, 1], "float32"))
    made = tf.data.Dataset.from_generator(of_any_length, output_signature=spec)
    return {"x": made, "y": None, "batch_size": None}


def compiled(**options):
    return {"compile": options}


NORM = of(layers.BatchNormalization)
SYNCHRONISED = of(layers.BatchNormalization, synchronized=True)
REGULARIZED = {"kernel_regularizer": "l1l2", "kernel_constraint": "max_norm"}
METRICS = [keras.metrics.RootMeanSquaredError, keras.metrics.R2Score, MedianError]
PROGRAMS = {
    "sequences of any length": {
        "make": of_words(of(layers.LSTM, 3)),
        "fit": batches,
    },
    "normalised by tower": {"make": sequential(dense(), NORM), "by_hand": True},
    "synchronised": {"make": sequential(dense(), SYNCHRONISED)},
    "dropout": {
        "make": sequential(dense(), of(layers.Dropout, 0.5, seed=1)),
        "by_hand": True,
    },
    "regularized": {"make": sequential(dense(**REGULARIZED))},
    "activity regularized": {"make": sequential(dense(activity_regularizer="l2"))},
    "a scan": {**computing(scan), "by_hand": True},  # along the rows of a part
    "mapped": computing(lambda x, w, _: tf.map_fn(lambda r: tf.linalg.matvec(w, r), x)),
    "Python inside": computing(
        lambda x, w, _: tf.ensure_shape(
            tf.numpy_function(np.abs, [x], x.dtype), x.shape
        )
    ),
    "own gradient": computing(lambda x, w, _: halved_gradient(x @ w)),
    "computed again": computing(
        lambda x, w, _: tf.recompute_grad(lambda y: tf.tanh(y @ w))(x)
    ),
    "one tape, two optimizers": {"make": TwoOptimizers},
    "through a loop, two optimizers": {
        "make": lambda: TwoOptimizers(of_words(of(layers.GRU, 3))),
        "x": WORDS,
    },
    "own methods": {"make": OwnMethods},
    "metrics": {"compile": lambda: {"metrics": [kind() for kind in METRICS]}},
    "several steps in one call": {
        "make": of_words(of(layers.LSTM, 3), SYNCHRONISED),
        "x": WORDS,
        **compiled(steps_per_execution=STEPS),
    },
}


# The last batch has one row, which is lent to all other towers.
FEW = {"fit": {"batch_size": 35}}
CONV = of(layers.Conv2D, 3, 3, activation="tanh")  # which fails without rows
FLAT = of(layers.Flatten)
CONVOLUTIONAL = sequential(CONV, SYNCHRONISED, FLAT, shape=(6, 6, 2))
OF_FEW_ROWS = {
    "batches of one": {
        "make": CONVOLUTIONAL,
        "x": IMAGES[:5],
        "y": Y[:5],
        "optimizer": of(optimizers.SGD, 0.001, momentum=0.9),
        "fit": {"batch_size": 1},
    },
    "added and synchronised": {
        "make": CONVOLUTIONAL,
        "x": IMAGES,
        "optimizer": of(optimizers.SGD, 0.001),
        **compiled(loss=keras.losses.MeanSquaredError(reduction="sum")),
        **FEW,
    },
    "words, added": {
        "make": of_words(FLAT),
        "x": WORDS,
        "optimizer": of(optimizers.SGD, 0.01),
        **compiled(loss=keras.losses.MeanSquaredError(reduction="sum")),
        **FEW,
    },
    "add_loss": {"make": OwnMethods, **FEW},
}


# Those whose evaluation and predictions differ from other programs'.
EVALUATED = (OwnMethods, CONVOLUTIONAL)


def given(program, name):
    options = program.get(name, {})
    return options() if callable(options) else options


def results_of(model, program):
    """Trains a model; returns its history, weights, evaluation and predictions."""
    optimizer = program.get("optimizer", of(optimizers.SGD, 0.1, momentum=0.9))()
    model.compile(optimizer, **{"loss": "mse", **given(program, "compile")})
    x, y = program.get("x", X), program.get("y", Y)
    options = {"x": x, "y": y, "batch_size": 10, "epochs": 2, "shuffle": False}
    fitted = {**options, **given(program, "fit"), "verbose": 0}
    results = [model.fit(**fitted).history, model.get_weights()]
    if program.get("make") in EVALUATED:
        results += [model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)]
        results += [model.predict(x, batch_size=10, verbose=0)]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("num_towers", [2, 3])
def test_a_program_does_over_towers_what_it_does_on_one_device(num_towers, name):
    program = PROGRAMS[name]

    make = program.get("make", sequential(dense()))
    many = towers_of(make, num_towers, **program.get("towers", {}))
    results = results_of(many, program)
    if program.get("by_hand"):
        check_near(many.get_weights(), by_hand(towers_of(make, num_towers)), 2e-5)
    else:
        check_near(results, results_of(seeded(make)(), program), 5e-6)


def by_hand(model, batch_size=10, epochs=2):
    """Trains a model's towers with the mean of their gradients; returns tower 0."""
    towers = model.towers
    for tower in towers:
        tower.compile(optimizers.SGD(0.1, momentum=0.9), "mse")
    for start in [*range(0, ROWS, batch_size)] * epochs:
        rows = np.array_split(np.arange(ROWS)[start : start + batch_size], len(towers))
        of_towers = []
        for tower, own in zip(towers, rows, strict=True):
            with tf.GradientTape() as tape:
                loss = tower.compute_loss(X[own], Y[own], tower(X[own], training=True))
            grads = tape.gradient(loss, tower.trainable_variables)
            of_towers.append([len(own) / sum(map(len, rows)) * grad for grad in grads])
        mean = [tf.add_n(column) for column in zip(*of_towers, strict=True)]
        for tower in towers:
            tower.optimizer.apply(mean, tower.trainable_variables)
    return towers[0].get_weights()


@pytest.mark.slow(by_day=["2-batches of one"])
@pytest.mark.parametrize("name", OF_FEW_ROWS)
@pytest.mark.parametrize("num_towers", [2, 3])
def test_towers_without_rows_count_for_nothing(num_towers, name):
    program = OF_FEW_ROWS[name]
    models = towers_of(program["make"], num_towers), seeded(program["make"])()
    check_near(*(results_of(model, program) for model in models), 2e-5)

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


def functional():
    a, b = (keras.Input([4], name=name) for name in "ab")
    both = layers.Concatenate()([a, b])
    outputs = {"p": layers.Dense(1, name="p")(both), "q": layers.Dense(1, name="q")(a)}
    return keras.Model({"a": a, "b": b}, outputs)


def siamese():
    a, b = keras.Input([4]), keras.Input([4])
    shared = layers.Dense(3, "tanh")
    return keras.Model([a, b], layers.Dot(-1)([shared(a), shared(b)]))


def transformer():
    words = keras.Input([5], dtype="int64")
    places = layers.Embedding(5, 4)(keras.ops.arange(5))
    x = layers.Embedding(9, 4)(words) + places
    attended = layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attended)
    return keras.Model(words, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def encoder_and_decoder():
    words = keras.Input([5], dtype="int64")
    embedded = layers.Embedding(9, 4)(words)
    _, *state = layers.LSTM(3, return_state=True)(embedded)
    decoded = layers.LSTM(3)(embedded, initial_state=state)
    return keras.Model(words, layers.Dense(1)(decoded))


def on_a_frozen_base():
    base = sequential(dense(), of(layers.BatchNormalization), out=None)()
    base.trainable = False
    x = keras.Input([4])
    return keras.Model(x, layers.Dense(1)(base(x, training=False)))


def fine_tune(model):
    model.trainable = True
    model.compile(optimizers.SGD(0.01), "mse")


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


def loop(x, kernel, count):
    return tf.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, y @ kernel), [0, x])[
        1
    ]


def branch(x, kernel, count):
    return tf.cond(count > 3, lambda: tf.tanh(x @ kernel), lambda: x @ kernel)


def scan(x, kernel, count):
    return tf.scan(lambda y, row: tf.tanh(row @ kernel + y), x[:, None], x[:1])[:, 0]


@tf.custom_gradient
def halved_gradient(x):
    return x, lambda upstream: upstream / 2


class Step(keras.Model):
    """A model with a ``train_step`` that calls a function."""

    def __init__(self, step, make=None):
        super().__init__()
        make = make or sequential(dense())
        self.inner, self.step = make(), step
        self.teacher, self.tracker = make(), keras.metrics.Mean("tracked")
        self.teacher.trainable = False
        self.second = optimizers.RMSprop(0.01, epsilon=1e-2)
        self.share = self.add_weight(name="share", initializer="ones", trainable=False)
        self.sums = [
            self.add_weight(shape=own.shape, initializer="zeros", trainable=False)
            for own in self.inner.trainable_variables
        ]

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def error(self, x, y):
        return tf.reduce_mean((self.inner(x, training=True) - y) ** 2)

    def train_step(self, data):
        loss = self.step(self, *data)
        self.tracker.update_state(loss, sample_weight=tf.shape(data[1])[0])
        return {"loss": loss, "tracked": self.tracker.result(), "share": self.share}


def accumulating(self, x, y):
    """Applies every second time."""
    variables = self.inner.trainable_variables
    with tf.GradientTape() as tape:
        loss = self.error(x, y)
    for own, grad in zip(self.sums, tape.gradient(loss, variables), strict=True):
        own.assign_add(grad)
    self.share.assign(1 - self.share)
    self.optimizer.apply([own * self.share for own in self.sums], variables)
    for own in self.sums:
        own.assign(own * (1 - self.share))
    return loss


def penalised(self, x, y):
    """Differentiates the norm of a gradient."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = self.inner(x, training=True)
        slope = tf.norm(tape.gradient(score, x), axis=1)
        loss = tf.reduce_mean(score * y) + tf.reduce_mean((slope - 1) ** 2)
    variables = self.inner.trainable_variables
    self.optimizer.apply(outer.gradient(loss, variables), variables)
    return loss


def through_one_tape(self, x, y):
    """Applies with two optimizers, the second after the first has updated."""
    with tf.GradientTape(persistent=True) as tape:
        loss = self.error(x, y)
    first, rest = (self.inner.layers[n].trainable_variables for n in (-1, 0))
    self.optimizer.apply(tape.gradient(loss, first), first)
    self.second.apply_gradients(zip(tape.gradient(loss, rest), rest, strict=True))
    return loss


def in_turns(self, x, y):
    """Two losses and updates, of which the second sees the first, as in a GAN."""
    for optimizer, sign in ((self.optimizer, 1.0), (self.second, -0.5)):
        variables = self.inner.trainable_variables
        with tf.GradientTape() as tape:
            loss = sign * self.error(x, y)
        optimizer.apply(tape.gradient(loss, variables), variables)
    return loss


def following_a_mean(self, x, y):
    """Learns from a teacher that follows the student."""
    variables = self.inner.trainable_variables
    with tf.GradientTape() as tape:
        taught = tf.reduce_mean((self.inner(x) - self.teacher(x)) ** 2)
        loss = self.error(x, y) + self.share * taught
    self.optimizer.apply(tape.gradient(loss, variables), variables)
    for own, new in zip(self.teacher.variables, variables, strict=True):
        own.assign(0.9 * own + 0.1 * new)
    self.share.assign(self.share * 0.9)
    return loss


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


def callbacks():
    of_keras = keras.callbacks
    return [
        of_keras.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
        of_keras.ReduceLROnPlateau("loss", patience=0, min_delta=10),
        of_keras.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        of_keras.TerminateOnNaN(),
        of_keras.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]


def stepping(step, **options):
    return {"make": lambda: Step(step), **options}


def compiled(**options):
    return {"compile": options}


NORM = of(layers.BatchNormalization)
SYNCHRONISED = of(layers.BatchNormalization, synchronized=True)
REGULARIZED = {"kernel_regularizer": "l1l2", "kernel_constraint": "max_norm"}
METRICS = [keras.metrics.RootMeanSquaredError, keras.metrics.R2Score, MedianError]
PROGRAMS = {
    "sequential": {},
    "dicts in and out": {
        "make": functional,
        "x": {"a": X, "b": X**2},
        "y": {"p": Y, "q": -Y},
        **compiled(loss={"p": "mse", "q": "mae"}, metrics={"p": ["mae"]}),
    },
    "siamese": {"make": siamese, "x": [X, X**2]},
    "transformer": {
        "make": transformer,
        "x": WORDS,
        "optimizer": of(optimizers.SGD, 0.01),  # at 0.1 rounding errors grow
    },
    "encoder and decoder": {"make": encoder_and_decoder, "x": WORDS},
    "stacked recurrent": {
        "make": of_words(
            of(layers.Bidirectional, layers.GRU(3, return_sequences=True)),
            lambda: layers.RNN([layers.LSTMCell(3), layers.GRUCell(2)]),
        ),
        "x": WORDS,
    },
    "sequences of any length": {
        "make": of_words(of(layers.LSTM, 3)),
        "fit": batches,
    },
    "images": {
        "make": sequential(
            of(layers.SeparableConv2D, 4, 3, activation="relu"),
            of(layers.GroupNormalization, 2),
            of(layers.Conv2DTranspose, 2, 2),
            of(layers.GlobalMaxPooling2D),
            shape=(6, 6, 2),
        ),
        "x": IMAGES,
    },
    "strings": {
        "make": sequential(
            of(layers.StringLookup, vocabulary=list("abc"), output_mode="one_hot"),
            shape=(1,),
            dtype="string",
        ),
        "x": tf.constant([[letter] for letter in "abcd" * 9]),
        "y": tf.constant(Y),
    },
    "normalised by tower": {"make": sequential(dense(), NORM), "by_hand": True},
    "synchronised": {"make": sequential(dense(), SYNCHRONISED)},
    "recurrent, synchronised": {
        "make": of_words(of(layers.LSTM, 3), SYNCHRONISED),
        "x": WORDS,
    },
    "dropout": {
        "make": sequential(dense(), of(layers.Dropout, 0.5, seed=1)),
        "by_hand": True,
    },
    "regularized": {"make": sequential(dense(**REGULARIZED))},
    "activity regularized": {"make": sequential(dense(activity_regularizer="l2"))},
    "fine-tuned": {"make": on_a_frozen_base, "then": fine_tune},
    "a loop": computing(loop),
    "a branch": {**computing(branch), "by_hand": True},  # a count of each tower
    "a scan": {**computing(scan), "by_hand": True},  # along the rows of a part
    "mapped": computing(lambda x, w, _: tf.map_fn(lambda r: tf.linalg.matvec(w, r), x)),
    "Python inside": computing(
        lambda x, w, _: tf.ensure_shape(
            tf.numpy_function(np.abs, [x], x.dtype), x.shape
        )
    ),
    "a function inside": computing(tf.function(lambda x, w, _: tf.tanh(x @ w))),
    "own gradient": computing(lambda x, w, _: halved_gradient(x @ w)),
    "computed again": computing(
        lambda x, w, _: tf.recompute_grad(lambda y: tf.tanh(y @ w))(x)
    ),
    # Parts of 10 rows for three towers weigh otherwise than those of the next 6.
    "own accumulation": stepping(accumulating, fit={"batch_size": 12}),
    "gradient penalty": stepping(penalised),
    "one tape, two optimizers": stepping(through_one_tape),
    "through a loop, two optimizers": {
        "make": lambda: Step(through_one_tape, of_words(of(layers.GRU, 3))),
        "x": WORDS,
    },
    "in turns": stepping(in_turns),
    "mean teacher": stepping(following_a_mean),
    "own methods": {"make": OwnMethods},
    "metrics": {"compile": lambda: {"metrics": [kind() for kind in METRICS]}},
    "callbacks": {"fit": lambda: {"callbacks": callbacks(), "validation_split": 0.25}},
    "fewer rows than towers": {"fit": {"batch_size": 2}},
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
OF_FEW_ROWS = {
    "synchronised": {
        "make": sequential(CONV, SYNCHRONISED, FLAT, shape=(6, 6, 2)),
        "x": IMAGES,
        "optimizer": of(optimizers.SGD, 0.01, momentum=0.9),
        **FEW,
    },
    "batches of one": {
        "make": sequential(CONV, SYNCHRONISED, FLAT, shape=(6, 6, 2)),
        "x": IMAGES[:5],
        "y": Y[:5],
        "optimizer": of(optimizers.SGD, 0.001, momentum=0.9),
        "fit": {"batch_size": 1},
    },
    "added": {
        "make": sequential(CONV, FLAT, shape=(6, 6, 2)),
        "x": IMAGES,
        "optimizer": of(optimizers.Adam, 0.01),
        **compiled(loss=keras.losses.MeanSquaredError(reduction="sum")),
        **FEW,
    },
    "added and synchronised": {
        "make": sequential(CONV, SYNCHRONISED, FLAT, shape=(6, 6, 2)),
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


def given(program, name):
    options = program.get(name, {})
    return options() if callable(options) else options


def results_of(model, program):
    """Trains a model; returns its history, weights, evaluation and predictions."""
    optimizer = program.get("optimizer", of(optimizers.SGD, 0.1, momentum=0.9))()
    model.compile(optimizer, **{"loss": "mse", **given(program, "compile")})
    x, y = program.get("x", X), program.get("y", Y)
    options = {"x": x, "y": y, "batch_size": 10, "epochs": 2, "shuffle": False}
    results = []
    for change in (lambda model: None, program.get("then")):
        if change is not None:
            change(model)
            fitted = {**options, **given(program, "fit"), "verbose": 0}
            results += [model.fit(**fitted).history, model.get_weights()]
    results.append(model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True))
    return [*results, model.predict(x, batch_size=10, verbose=0)]


@pytest.mark.full(
    *("3-strings", "2-recurrent, synchronised", "3-mean teacher", "2-own methods"),
    *("2-through a loop, two optimizers", "3-dropout", "3-metrics", "2-callbacks"),
)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("num_towers", [2, 3])
def test_a_program_does_over_towers_what_it_does_on_one_device(num_towers, name):
    program = PROGRAMS[name]

    make = program.get("make", sequential(dense()))
    many = towers_of(make, num_towers)
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


@pytest.mark.full("3-added and synchronised", "3-batches of one", "2-words, added")
@pytest.mark.parametrize("name", OF_FEW_ROWS)
@pytest.mark.parametrize("num_towers", [2, 3])
def test_towers_without_rows_count_for_nothing(num_towers, name):
    program = OF_FEW_ROWS[name]
    models = towers_of(program["make"], num_towers), seeded(program["make"])()
    check_near(*(results_of(model, program) for model in models), 2e-5)

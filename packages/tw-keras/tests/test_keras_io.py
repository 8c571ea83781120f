"""Programs of the shapes that keras.io's examples have, beside one device.

GANs, autoencoders, distillation, diffusion and the like: steps of one's own, with
parts that only they call, several optimizers, dicts, state and metrics. Random numbers
are replaced by functions of a row, so that they do not depend on how a batch is cut.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import Stepping, check_near, descend, seeded, towers_of

layers, ops, optimizers = keras.layers, keras.ops, keras.optimizers
RANDOM = np.random.default_rng(0)
ROWS = 21  # batches of 10, 10 and 1: towers lack rows
X = RANDOM.normal(size=(ROWS, 4))
Y = RANDOM.normal(size=(ROWS, 2))
LABELS = RANDOM.integers(0, 3, ROWS)
WORDS = RANDOM.integers(0, 6, (ROWS, 5))
WORDS[:, 0] = 1  # a row has a word at least; 0 is masked
WEIGHTS = RANDOM.uniform(0.5, 1.5, ROWS)
pytestmark = pytest.mark.usefixtures("in_float64")


def noise(x, frequency=37.0):
    """Returns numbers that look random, as a function of ``x``."""
    return tf.sin(frequency * x + 1.0)


def mean_square(difference):
    return tf.reduce_mean(tf.square(difference))


def dense(units=2, activation=None, **options):
    return layers.Dense(units, activation, **options)


def mlp(inputs, *units):
    hidden = [dense(n, "tanh") for n in units[:-1]]
    return keras.Sequential([keras.Input([inputs]), *hidden, dense(units[-1])])


class Perceptron(Stepping):
    def __init__(self):
        super().__init__()
        self.inner = mlp(4, 5, 2)

    def call(self, x):
        return self.inner(x)


class Distiller(Stepping):
    """The teacher is built by the step; losses have temperatures and weights."""

    part = "student"

    def __init__(self):
        super().__init__()
        self.student = keras.Sequential([dense(5, "tanh"), dense(3)])
        self.teacher = keras.Sequential([dense(8, "tanh"), dense(3)])
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def loss_of(self, data):
        x, y = data
        taught = tf.nn.softmax(self.teacher(x, training=False) / 3)
        learned = self.student(x, training=True)
        apart = keras.losses.kl_divergence(taught, tf.nn.softmax(learned / 3))
        wrong = keras.losses.sparse_categorical_crossentropy(y, learned, True)
        return 0.1 * tf.reduce_mean(wrong) + 0.9 * 9 * tf.reduce_mean(apart)


class SelfDistillation(Stepping):
    """A projector and a predictor that only the step calls, and a stopped gradient."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([dense(4, "tanh")])
        self.projector, self.predictor = dense(3, "tanh"), dense(3)

    def call(self, x):
        return self.encoder(x)

    def loss_of(self, data):
        views = [self.projector(self.encoder(own)) for own in (data, data + 0.1)]
        ahead = [self.predictor(own) for own in views]
        pairs = zip(ahead, reversed(views), strict=True)
        return tf.add_n(
            [
                tf.reduce_mean(keras.losses.cosine_similarity(p, tf.stop_gradient(z)))
                for p, z in pairs
            ]
        )


class Patches(layers.Layer):
    """Makes its layers when it is built."""

    def build(self, shape):
        first, second = (keras.initializers.RandomNormal(seed=n) for n in (1, 2))
        self.projection = dense(3, kernel_initializer=first)
        self.places = layers.Embedding(2, 3, embeddings_initializer=second)

    def call(self, x):
        patches = tf.reshape(x, [-1, 2, 2])
        return self.projection(patches) + self.places(tf.range(2))


class MaskedAutoencoder(Stepping):
    """Has no call; masks depend on rows; uses the compiled loss and a metric."""

    def __init__(self):
        super().__init__()
        self.patches, self.decoder = Patches(), dense(4)

    @property
    def metrics(self):
        return keras.Model.metrics.fget(self)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            kept = tf.cast(noise(x) > -0.5, x.dtype)
            found = self.decoder(layers.Flatten()(self.patches(x * kept)))
            loss = self.compute_loss(y=x, y_pred=found)
        variables = [
            *self.patches.trainable_variables,
            *self.decoder.trainable_variables,
        ]
        descend(self.optimizer, tape, loss, variables)
        for own in self.metrics:
            if own.name != self.tracker.name:
                own.update_state(x, found)
        self.track(self.tracker, loss, x)
        return {own.name: own.result() for own in self.metrics}


class Gan(Stepping):
    """Two optimizers, each with its loss; the second sees the first's update."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = mlp(4, 5, 1), mlp(4, 5, 4)
        self.of_generator = keras.metrics.Mean("of generator")
        self.more_metrics = [self.of_generator]

    def compile(self, first, second, loss):
        super().compile()
        self.first, self.second, self.loss_of_labels = first, second, loss

    def train_step(self, real):
        latent = noise(real)
        both = tf.concat([self.generator(latent), real], axis=0)
        rows = tf.shape(real)[0]
        labels = tf.concat([tf.ones([rows, 1]), tf.zeros([rows, 1])], axis=0)
        labels += 0.05 * tf.cast(noise(both[:, :1]), labels.dtype)
        with tf.GradientTape() as tape:
            loss = self.loss_of_labels(labels, self.discriminator(both))
        descend(self.first, tape, loss, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            fakes = self.discriminator(self.generator(latent))
            own_loss = self.loss_of_labels(tf.zeros([rows, 1]), fakes)
        descend(self.second, tape, own_loss, self.generator.trainable_weights)
        self.track(self.tracker, loss, real)
        self.track(self.of_generator, own_loss, real)
        return {own.name: own.result() for own in self.metrics}


class WassersteinGan(Gan):
    """Two updates of the critic, with a penalty on its gradient, to one other."""

    def penalty(self, real, fake):
        share = 0.5 + 0.5 * noise(real[:, :1])
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.discriminator(between, training=True)
        slope = tape.gradient(score, between)
        return mean_square(tf.sqrt(tf.reduce_sum(slope**2, axis=1)) - 1.0)

    def train_step(self, real):
        for n in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(noise(real, 31.0 + n))
                scores = [self.discriminator(own) for own in (fake, real)]
                loss = tf.reduce_mean(scores[0]) - tf.reduce_mean(scores[1])
                loss += 10 * self.penalty(real, fake)
            descend(self.first, tape, loss, self.discriminator.trainable_variables)
        with tf.GradientTape() as tape:
            own_loss = -tf.reduce_mean(self.discriminator(self.generator(noise(real))))
        descend(self.second, tape, own_loss, self.generator.trainable_variables)
        return {"critic": loss, "generator": own_loss}


class Sampling(layers.Layer):
    def call(self, inputs):
        mean, log_variance = inputs
        return mean + tf.exp(0.5 * log_variance) * noise(mean)


class Vae(Stepping):
    """Functional encoder and decoder inside; three tracked losses."""

    def __init__(self):
        super().__init__()
        x = keras.Input([4])
        hidden = dense(5, "tanh")(x)
        mean, log_variance = dense(2)(hidden), dense(2)(hidden)
        latent = Sampling()([mean, log_variance])
        self.encoder = keras.Model(x, [mean, log_variance, latent])
        self.decoder = mlp(2, 5, 4)
        self.trackers = [keras.metrics.Mean(name) for name in ("loss", "error", "kl")]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, latent = self.encoder(data)
            error = tf.reduce_mean(
                tf.reduce_sum((self.decoder(latent) - data) ** 2, axis=1)
            )
            kl = -0.5 * (1 + log_variance - mean**2 - tf.exp(log_variance))
            kl = tf.reduce_mean(tf.reduce_sum(kl, axis=1))
            loss = error + kl
        descend(self.optimizer, tape, loss, self.trainable_weights)
        for own, value in zip(self.trackers, (loss, error, kl), strict=True):
            self.track(own, value, data)
        return {own.name: own.result() for own in self.trackers}


class Quantizer(layers.Layer):
    """Takes the nearest row of a table, and adds losses of its own."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(3, 4), initializer="glorot_uniform")

    def call(self, x):
        table = tf.convert_to_tensor(self.table)
        apart = tf.reduce_sum((x[:, None] - table[None]) ** 2, axis=-1)
        nearest = tf.gather(table, tf.argmin(apart, axis=1))
        self.add_loss(0.25 * mean_square(tf.stop_gradient(nearest) - x))
        self.add_loss(mean_square(nearest - tf.stop_gradient(x)))
        return x + tf.stop_gradient(nearest - x)


class VqVae(Stepping):
    """Differentiates its error and what a layer adds."""

    def __init__(self):
        super().__init__()
        self.vqvae = keras.Sequential([keras.Input([4]), dense(4), Quantizer()])
        self.decoder = dense(4)

    def loss_of(self, x):
        error = mean_square(self.decoder(self.vqvae(x)) - x) / 0.7
        return error + tf.add_n(self.vqvae.losses)


class Diffusion(Stepping):
    """A network, its moving average, a normalisation, and a test of the average."""

    part = "network"

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.normalizer.adapt(X)
        self.network, self.average = mlp(5, 6, 4), mlp(5, 6, 4)
        self.average.set_weights(self.network.get_weights())

    def denoised(self, network, x):
        x = self.normalizer(x)
        times = 0.5 + 0.5 * noise(x[:, :1], 11.0)
        mixed = tf.cos(times) * x + tf.sin(times) * noise(x)
        return network(tf.concat([mixed, times**2], axis=1)), noise(x)

    def loss_of(self, data):
        found, wanted = self.denoised(self.network, data)
        return tf.reduce_mean(keras.losses.mean_absolute_error(wanted, found))

    def train_step(self, data):
        logs = super().train_step(data)
        pairs = zip(self.network.weights, self.average.weights, strict=True)
        for weight, average in pairs:
            average.assign(0.9 * average + 0.1 * weight)
        return logs

    def test_step(self, data):
        found, wanted = self.denoised(self.average, data)
        self.track(self.tracker, mean_square(found - wanted), data)
        return {"loss": self.tracker.result()}


class Triplets(Stepping):
    """Batches of three parts, and a functional model of three inputs."""

    def __init__(self):
        super().__init__()
        self.embedding = mlp(4, 5, 2)
        inputs = [keras.Input([4], name=name) for name in ("anchor", "near", "far")]
        anchor, near, far = map(self.embedding, inputs)
        apart = [
            ops.sum(ops.square(anchor - near), -1),
            ops.sum(ops.square(anchor - far), -1),
        ]
        self.network = keras.Model(inputs, apart)

    def call(self, inputs):
        return self.network(inputs)

    def loss_of(self, data):
        near, far = self.network(data)
        return tf.reduce_mean(tf.maximum(near - far + 0.5, 0.0))


class Mixup(keras.Model):
    """Mixes each row with its reflection, and leaves the rest to Keras."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(4, 5, 2)

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        share = 0.5 + 0.5 * noise(x[:, :1])
        mixed = share * x - (1 - share) * x[:, ::-1]
        return super().train_step((mixed, share * y))


class Adversarial(Perceptron):
    """Perturbs its inputs along a gradient, in a tape of its own."""

    def loss_of(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            errors = tf.reduce_sum((self(x) - y) ** 2, axis=1)
        moved = x + 0.1 * tf.stop_gradient(tf.sign(tape.gradient(errors, x)))
        return mean_square(self(x) - y) + 0.5 * mean_square(self(moved) - y)


def two_outputs():
    x, words = keras.Input([4], name="x"), keras.Input([5], dtype="int64", name="words")
    text = layers.GlobalAveragePooling1D()(
        layers.Embedding(6, 3, mask_zero=True)(words)
    )
    both = layers.concatenate([dense(3, "tanh")(x), text])
    outputs = {"score": dense(1, name="score")(both), "kind": dense(3, name="kind")(x)}
    return keras.Model({"x": x, "words": words}, outputs)


class Attention(keras.Model):
    """A block of a transformer, with places that all rows share."""

    def __init__(self):
        super().__init__()
        self.words, self.places = layers.Embedding(6, 4), layers.Embedding(5, 4)
        self.attention = layers.MultiHeadAttention(2, 2)
        self.norm, self.last = layers.LayerNormalization(), dense(2)

    def call(self, words):
        x = self.words(words) + self.places(ops.arange(5))
        x = self.norm(x + self.attention(x, x, use_causal_mask=True))
        return self.last(ops.mean(x, axis=1))


def recurrent():
    inner = [layers.Embedding(6, 4, mask_zero=True), layers.GRU(3), dense(2)]
    return keras.Sequential([keras.Input([5], dtype="int64"), *inner])


class Hits(keras.metrics.Metric):
    """Counts in two states, as a score of precision and recall does."""

    def __init__(self, name):
        super().__init__(name=name)
        self.hits, self.asked = (
            self.add_weight(name=own, initializer="zeros") for own in ("hits", "asked")
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        chosen = ops.cast(y_pred > 0, y_pred.dtype)
        self.hits.assign_add(ops.sum(chosen * ops.cast(y_true > 0, chosen.dtype)))
        self.asked.assign_add(ops.sum(chosen))

    def result(self):
        return ops.divide_no_nan(self.hits, self.asked)


class OwnMetrics(Perceptron):
    """Metrics of its own in the step and in the test, with weights of rows."""

    def __init__(self):
        super().__init__()
        self.hits, self.mae = Hits("hits"), keras.metrics.MeanAbsoluteError("mae")
        self.more_metrics = [self.hits, self.mae]

    def loss_of(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        found = self(x, training=True)
        self.hits.update_state(y, found)
        self.mae.update_state(y, found)
        return mean_square(found - y)


class Weighted(Perceptron):
    """Passes rows' weights on to the compiled loss."""

    def loss_of(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        return self.compute_loss(x, y, self(x), sample_weight=weights)


class Captions(Stepping):
    """Averages over words, by a compiled loss without a reduction."""

    def __init__(self):
        super().__init__()
        self.words, self.last = layers.Embedding(6, 4), dense(6)

    def call(self, words):
        return self.last(self.words(words))

    def loss_of(self, data):
        words = data[0]
        losses = self.loss(words[:, 1:], self(words[:, :-1]))
        mask = tf.cast(words[:, 1:] != 0, losses.dtype)
        return tf.reduce_sum(losses * mask) / (tf.reduce_sum(mask) + 1e-9)

    def track(self, tracker, value, data):
        weight = words_of(data[0], None, None)
        tracker.update_state(value, sample_weight=weight)


def words_of(x, y, sample_weight):
    return tf.reduce_sum(tf.cast(x[:, 1:] != 0, "float64"))


class Counting(layers.Layer):
    """Counts its calls, and warms up with them."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(initializer="zeros", trainable=False)

    def call(self, x, training=None):
        if training:
            self.calls.assign_add(1.0)
        return x * ops.minimum(self.calls / 4.0, 1.0)


def warming_up():
    return keras.Sequential([keras.Input([4]), dense(5, "tanh"), Counting(), dense()])


class TwoRates(Stepping):
    """A backbone and a head with optimizers of their own, from one tape."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = mlp(4, 5, 3), dense()
        self.slow = optimizers.Adam(0.001)

    def call(self, x):
        return self.head(self.backbone(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = mean_square(self(x, training=True) - y)
        parts = self.backbone.trainable_weights, self.head.trainable_weights
        first, rest = tape.gradient(loss, parts)
        self.slow.apply_gradients(zip(first, parts[0], strict=True))
        self.optimizer.apply_gradients(zip(rest, parts[1], strict=True))
        return {"loss": loss}


class Uncertain(Perceptron):
    """Learns the weights of its losses, which belong to the model itself."""

    def __init__(self):
        super().__init__()
        self.scales = self.add_weight(shape=(2,), initializer="zeros", name="scales")

    def loss_of(self, data):
        x, y = data
        errors = tf.reduce_mean((self(x) - y) ** 2, axis=0)
        scales = tf.convert_to_tensor(self.scales)
        return tf.reduce_sum(tf.exp(-scales) * errors + scales)


class Focal(keras.losses.Loss):
    """A loss of one's own, over rows."""

    def call(self, y_true, y_pred):
        right = ops.take_along_axis(
            ops.softmax(y_pred), ops.cast(y_true, "int64")[:, None], axis=1
        )
        return -((1 - right[:, 0]) ** 2) * ops.log(right[:, 0])


class Ranking(keras.Model):
    """Users and items in a dict; the shape it computes is never asked for."""

    def __init__(self):
        super().__init__()
        self.users, self.items = layers.Embedding(3, 4), layers.Embedding(6, 4)
        self.score = dense(1)

    def build(self, shapes):
        self.users.build(shapes["user"])
        self.items.build(shapes["items"])
        self.score.build([*shapes["items"], 8])

    def call(self, inputs):
        items = self.items(inputs["items"])
        users = ops.repeat(self.users(inputs["user"])[:, None], 5, axis=1)
        both = ops.concatenate([users, items], axis=-1)
        return ops.squeeze(self.score(both), axis=-1)

    def compute_output_shape(self, shapes):
        return shapes[0]


def synchronised():
    norm = layers.BatchNormalization(synchronized=True)
    return keras.Sequential([keras.Input([4]), dense(5), norm, dense()])


class Accumulates(Perceptron):
    """Adds gradients in variables of its own, and applies every second batch."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(initializer="zeros", trainable=False)
        self.sums = [
            self.add_weight(shape=own.shape, initializer="zeros", trainable=False)
            for own in self.inner.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        variables = self.inner.trainable_variables
        with tf.GradientTape() as tape:
            loss = mean_square(self(x, training=True) - y)
        for own, grad in zip(self.sums, tape.gradient(loss, variables), strict=True):
            own.assign_add(grad)
        self.count.assign_add(1.0)
        tf.cond(self.count.value >= 2.0, self.apply_sums, lambda: None)
        return {"loss": loss}

    def apply_sums(self):
        sums = [tf.convert_to_tensor(own) for own in self.sums]
        self.optimizer.apply(sums, self.inner.trainable_variables)
        for own in (*self.sums, self.count):
            own.assign(tf.zeros_like(own.value))


def adam(**options):
    return optimizers.Adam(0.01, epsilon=1e-3, **options)


def labelled(**options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
    return {"loss": loss}


def in_dataset(x):
    """Returns the options for data whose batches Keras does not take apart."""
    data = tf.data.Dataset.from_tensor_slices(x).batch(10)
    return {"x": data, "y": None, "batch_size": None}


def of_gan():
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return {"first": adam(), "second": adam(), "loss": loss}


TEXT = {"x": WORDS}
UNLABELLED = {"fit": lambda: in_dataset(X)}
SQUARED = {"compile": lambda: {"loss": "mse"}}
WITH_MAE = {"compile": lambda: {"loss": "mse", "metrics": ["mae"]}}
PROGRAMS = {
    "distillation": {"make": Distiller, "y": LABELS, "evaluates": True},
    "self-distillation": {"make": SelfDistillation, **UNLABELLED},
    "masked autoencoder": {"make": MaskedAutoencoder, **WITH_MAE, **UNLABELLED},
    "GAN": {"make": Gan, "compile": of_gan, **UNLABELLED},
    "WGAN-GP": {"make": WassersteinGan, "compile": of_gan, **UNLABELLED},
    "VAE": {"make": Vae, **UNLABELLED},
    "VQ-VAE": {"make": VqVae, **UNLABELLED, "evaluates": True},
    "diffusion": {"make": Diffusion, **UNLABELLED, "evaluates": True},
    "triplets": {
        "make": Triplets,
        "fit": lambda: in_dataset((X, X + 0.1, X[::-1])),
        "evaluates": True,
    },
    "mixup": {"make": Mixup, **WITH_MAE},
    "adversarial": {"make": Adversarial},
    "two outputs": {
        "make": two_outputs,
        "x": {"x": X, "words": WORDS},
        "y": {"score": Y[:, :1], "kind": LABELS},
        "compile": lambda: {
            "loss": {"score": "mse", "kind": labelled()["loss"]},
            "loss_weights": {"score": 0.3, "kind": 1.0},
            "metrics": {"kind": ["accuracy"]},
        },
        "evaluates": True,
    },
    "transformer": {"make": Attention, **TEXT, **SQUARED},
    "masked recurrence": {"make": recurrent, **TEXT, **WITH_MAE},
    "own metrics": {"make": OwnMetrics, "evaluates": True},
    "weights of rows": {
        "make": Weighted,
        **SQUARED,
        "fit": lambda: {"sample_weight": WEIGHTS},
    },
    "captions": {
        "make": Captions,
        **TEXT,
        "compile": lambda: labelled(reduction=None),
        "towers": {"weights": words_of},
        "evaluates": True,
    },
    "state in the call": {"make": warming_up, **SQUARED},
    "two rates": {"make": TwoRates},
    "weights of losses": {"make": Uncertain},
    "own loss": {
        "make": lambda: mlp(4, 5, 3),
        "y": LABELS,
        "compile": lambda: {"loss": Focal(), "metrics": ["accuracy"]},
    },
    "ranking": {
        "make": Ranking,
        "x": {"user": LABELS, "items": WORDS},
        "y": RANDOM.normal(size=(ROWS, 5)),
        **SQUARED,
    },
    "synchronised": {
        "make": synchronised,
        "compile": lambda: {"loss": "mse", "optimizer": optimizers.SGD(0.01)},
    },
    "clipped by the optimizer": {
        "make": Weighted,
        "compile": lambda: {"loss": "mse", "optimizer": adam(global_clipnorm=0.1)},
    },
    "accumulated by the optimizer": {
        "make": Adversarial,
        "compile": lambda: {"optimizer": adam(gradient_accumulation_steps=2)},
    },
    # It weights both batches alike, and shared variables keep tower 0's sums.
    "accumulated in the step": {
        "make": Accumulates,
        "fit": lambda: {"batch_size": 7},
        "rooms": ["replicated", "sharded"],
        "is_full": True,
    },
}


def results_of(model, program):
    """Trains a model; returns its history, weights and evaluation."""
    given = {"optimizer": adam(), **program.get("compile", dict)()}
    if "first" in given:  # whose compile takes no other
        del given["optimizer"]
    model.compile(**given)
    options = {"x": program.get("x", X), "y": program.get("y", Y), "batch_size": 10}
    options |= {"verbose": 0, **program.get("fit", dict)()}
    if program.get("is_full"):
        rows = options["batch_size"] * (ROWS // options["batch_size"])
        options |= {name: options[name][:rows] for name in ("x", "y")}
    history = model.fit(**options, epochs=2, shuffle=False).history
    results = [history, model.get_weights()]
    if program.get("evaluates"):
        results.append(model.evaluate(**options, return_dict=True))
    return results


@functools.cache
def on_one_device(name):
    program = PROGRAMS[name]
    model = seeded(program["make"])()
    return results_of(model, program)


MODES = (1, "replicated"), (2, "replicated"), (3, "sharded"), (3, "parameter_server")
ROOMS = [
    (name, num_towers, variables)
    for name in PROGRAMS
    for num_towers, variables in MODES
    if variables in PROGRAMS[name].get("rooms", [variables])
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_towers", "variables"), ROOMS)
def test_a_program_of_keras_io_trains_as_on_one_device(name, num_towers, variables):
    program = PROGRAMS[name]
    options = program.get("towers", {})
    many = towers_of(program["make"], num_towers, variables=variables, **options)
    check_near(results_of(many, program), on_one_device(name), 1e-6)
    for tower in many.towers[1:]:
        check_near(tower.get_weights(), many.get_weights(), 0.0)

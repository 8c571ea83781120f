"""Programs of the shapes that keras.io's examples have, beside one device.

GANs, autoencoders, distillation, diffusion and the like: steps of one's own, with
parts that only they call, several optimizers and losses. Random numbers are replaced
by functions of a row, so that they do not depend on how a batch is cut.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import check_near, seeded, towers_of

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


class Stepping(keras.Model):
    """Trains ``trained`` on ``loss_of``, and tracks the loss by rows."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.tracker]

    @property
    def trained(self):
        return self.trainable_variables

    def track(self, tracker, value, data):
        rows = tf.shape(tf.nest.flatten(data)[0])[0]
        tracker.update_state(value, sample_weight=rows)

    def loss_of(self, data):
        raise NotImplementedError

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        variables = self.trained
        grads = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(grads, variables, strict=True))
        self.track(self.tracker, loss, data)
        return {own.name: own.result() for own in self.metrics}

    def test_step(self, data):
        self.track(self.tracker, self.loss_of(data), data)
        return {own.name: own.result() for own in self.metrics}


class Perceptron(Stepping):
    def __init__(self):
        super().__init__()
        self.inner = mlp(4, 5, 2)

    def call(self, x):
        return self.inner(x)


class Distiller(Stepping):
    """The teacher is built by the step; losses have temperatures and weights."""

    def __init__(self):
        super().__init__()
        self.student = keras.Sequential([dense(5, "tanh"), dense(3)])
        self.teacher = keras.Sequential([dense(8, "tanh"), dense(3)])
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    @property
    def trained(self):
        return self.student.trainable_variables

    def loss_of(self, data):
        x, y = data
        taught = tf.nn.softmax(self.teacher(x, training=False) / 3)
        learned = self.student(x, training=True)
        apart = keras.losses.kl_divergence(taught, tf.nn.softmax(learned / 3))
        wrong = keras.losses.sparse_categorical_crossentropy(y, learned, True)
        return 0.1 * tf.reduce_mean(wrong) + 0.9 * 9 * tf.reduce_mean(apart)


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
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )
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

    def compile(self, first, second, loss):
        super().compile()
        self.first, self.second, self.loss_of_labels = first, second, loss

    @property
    def metrics(self):
        return [self.tracker, self.of_generator]

    def train_step(self, real):
        latent = noise(real)
        both = tf.concat([self.generator(latent), real], axis=0)
        rows = tf.shape(real)[0]
        labels = tf.concat([tf.ones([rows, 1]), tf.zeros([rows, 1])], axis=0)
        labels += 0.05 * tf.cast(noise(both[:, :1]), labels.dtype)
        with tf.GradientTape() as tape:
            loss = self.loss_of_labels(labels, self.discriminator(both))
        variables = self.discriminator.trainable_weights
        grads = tape.gradient(loss, variables)
        self.first.apply_gradients(zip(grads, variables, strict=True))
        with tf.GradientTape() as tape:
            fakes = self.discriminator(self.generator(latent))
            own_loss = self.loss_of_labels(tf.zeros([rows, 1]), fakes)
        variables = self.generator.trainable_weights
        grads = tape.gradient(own_loss, variables)
        self.second.apply_gradients(zip(grads, variables, strict=True))
        self.track(self.tracker, loss, real)
        self.track(self.of_generator, own_loss, real)
        return {own.name: own.result() for own in self.metrics}


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

    @property
    def trained(self):
        return self.network.trainable_weights

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


class Adversarial(Perceptron):
    """Perturbs its inputs along a gradient, in a tape of its own."""

    def loss_of(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            errors = tf.reduce_sum((self(x) - y) ** 2, axis=1)
        moved = x + 0.1 * tf.stop_gradient(tf.sign(tape.gradient(errors, x)))
        return mean_square(self(x) - y) + 0.5 * mean_square(self(moved) - y)


def recurrent():
    inner = [layers.Embedding(6, 4, mask_zero=True), layers.GRU(3), dense(2)]
    return keras.Sequential([keras.Input([5], dtype="int64"), *inner])


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


def adam(**options):
    return optimizers.Adam(0.01, epsilon=1e-3, **options)


def in_dataset(x):
    """Returns the options for data whose batches Keras does not take apart."""
    data = tf.data.Dataset.from_tensor_slices(x).batch(10)
    return {"x": data, "y": None, "batch_size": None}


def of_gan():
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return {"first": adam(), "second": adam(), "loss": loss}


PROGRAMS = {
    "distillation": {"make": Distiller, "y": LABELS, "evaluates": True},
    "masked autoencoder": {
        "make": MaskedAutoencoder,
        "compile": lambda: {"loss": "mse", "metrics": ["mae"]},
        "fit": lambda: in_dataset(X),
    },
    "GAN": {"make": Gan, "compile": of_gan, "fit": lambda: in_dataset(X)},
    "VQ-VAE": {"make": VqVae, "fit": lambda: in_dataset(X), "evaluates": True},
    "diffusion": {"make": Diffusion, "fit": lambda: in_dataset(X), "evaluates": True},
    "adversarial, accumulated": {
        "make": Adversarial,
        "compile": lambda: {"optimizer": adam(gradient_accumulation_steps=2)},
    },
    "masked recurrence": {
        "make": recurrent,
        "x": WORDS,
        "compile": lambda: {"loss": "mse", "metrics": ["mae"]},
    },
    "weights of rows, clipped": {
        "make": Weighted,
        "compile": lambda: {"loss": "mse", "optimizer": adam(global_clipnorm=0.1)},
        "fit": lambda: {"sample_weight": WEIGHTS},
    },
    "captions": {
        "make": Captions,
        "x": WORDS,
        "compile": lambda: {
            "loss": keras.losses.SparseCategoricalCrossentropy(True, reduction=None)
        },
        "towers": {"weights": words_of},
        "evaluates": True,
    },
    "weights of losses": {"make": Uncertain},
}


def results_of(model, program):
    """Trains a model; returns its history, weights and evaluation."""
    given = {"optimizer": adam(), **program.get("compile", dict)()}
    if "first" in given:  # whose compile takes no other
        del given["optimizer"]
    model.compile(**given)
    options = {"x": program.get("x", X), "y": program.get("y", Y), "batch_size": 10}
    options |= {"verbose": 0, **program.get("fit", dict)()}
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


@pytest.mark.full(
    *("2-replicated-distillation", "3-sharded-masked autoencoder"),
    *("3-parameter_server-GAN", "2-replicated-diffusion", "2-replicated-captions"),
)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(
    ("num_towers", "variables"),
    [(1, "replicated"), (2, "replicated"), (3, "sharded"), (3, "parameter_server")],
)
def test_a_program_of_keras_io_trains_as_on_one_device(name, num_towers, variables):
    program = PROGRAMS[name]
    options = program.get("towers", {})
    many = towers_of(program["make"], num_towers, variables=variables, **options)
    check_near(results_of(many, program), on_one_device(name), 1e-6)
    for tower in many.towers[1:]:
        check_near(tower.get_weights(), many.get_weights(), 0.0)

"""Models whose losses are no means over rows, written as for one device, in float64.

``gather`` joins the rows of all towers; on one device it does nothing.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tw_core.synchronized import gather

layers, ops = keras.layers, keras.ops
FLOAT64 = {"dtype": "float64"}
RANDOM = np.random.default_rng(3)
ROWS = 33  # three batches of 10, and one of 3
X = RANDOM.normal(size=(ROWS, 6))
OTHER = X + 0.1 * RANDOM.normal(size=X.shape)
LABELS = np.arange(ROWS) % 3


def encoder(units: int = 4) -> keras.Model:
    hidden = layers.Dense(8, "tanh", **FLOAT64)
    return keras.Sequential([hidden, layers.Dense(units, **FLOAT64)])


def info_nce(first: Any, second: Any, temperature: Any = 0.5) -> tf.Tensor:
    """A loss in which row n of ``first`` belongs to row n of ``second``."""
    logits = tf.matmul(first, second, transpose_b=True) / temperature
    labels = tf.range(tf.shape(logits)[0])
    both = [logits, tf.transpose(logits)]
    each = [tf.nn.sparse_softmax_cross_entropy_with_logits(labels, own) for own in both]
    return (tf.reduce_mean(each[0]) + tf.reduce_mean(each[1])) / 2


class SimCLR(keras.Model):
    """Two views of each row, in a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def call(self, views: Any) -> Any:
        return self.encoder(views[0])

    def loss_of(self, views: Any) -> tf.Tensor:
        embedded = [tf.nn.l2_normalize(self.encoder(view), 1) for view in views]
        return info_nce(*gather(embedded))

    def train_step(self, data: Any) -> dict[str, Any]:
        views, *_ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.loss_of(views)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}


class OfOwnRows(SimCLR):
    """Each tower has the loss of its rows, beside those of all."""

    def loss_of(self, views: Any) -> tf.Tensor:
        first, second = (tf.nn.l2_normalize(self.encoder(v), 1) for v in views)
        logits = tf.matmul(first, gather(second), transpose_b=True) / 0.5
        own = tf.reduce_sum(first * second, 1) / 0.5
        return tf.reduce_mean(tf.reduce_logsumexp(logits, 1) - own)


class CLIP(keras.Model):
    """Two encoders, a temperature that is learned, and ``compute_loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = encoder(), encoder()
        self.scale = self.add_weight(name="scale", initializer="ones", **FLOAT64)

    def call(self, pair: Any) -> Any:
        return self.images(pair[0]), self.texts(pair[1])

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
    ) -> tf.Tensor:
        images, texts = gather([tf.nn.l2_normalize(own, 1) for own in y_pred])
        return info_nce(images, texts, 1 / ops.exp(self.scale))


class NNCLR(SimCLR):
    """Neighbours from a queue, into which the rows of all towers go."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = self.add_weight(
            name="queue",
            shape=[16, 4],
            initializer=keras.initializers.RandomNormal(seed=1),
            trainable=False,
            **FLOAT64,
        )

    def loss_of(self, views: Any) -> tf.Tensor:
        first, second = gather(
            [tf.nn.l2_normalize(self.encoder(view), 1) for view in views]
        )
        nearest = tf.argmax(tf.matmul(first, self.queue, transpose_b=True), 1)
        neighbours = tf.gather(tf.convert_to_tensor(self.queue), nearest)
        loss = info_nce(neighbours, second)
        self.queue.assign(tf.concat([tf.stop_gradient(first), self.queue], 0)[:16])
        return loss


class Decorrelates(layers.Layer):
    """Adds VICReg's losses, of the variance and covariance of a batch."""

    def call(self, x: Any) -> Any:
        z = gather(x)
        z -= tf.reduce_mean(z, 0)
        count = tf.cast(tf.shape(z)[0], z.dtype)
        covariance = tf.matmul(z, z, transpose_a=True) / count
        spread = tf.nn.relu(1 - tf.sqrt(tf.linalg.diag_part(covariance) + 1e-4))
        off = covariance - tf.linalg.diag(tf.linalg.diag_part(covariance))
        self.add_loss(tf.reduce_mean(spread) + 0.1 * tf.reduce_sum(off**2))
        return x


def vicreg() -> keras.Model:
    adds = Decorrelates(**FLOAT64)
    return keras.Sequential([keras.Input([6], **FLOAT64), *encoder().layers, adds])


def triplets(labels: Any, embedded: Any) -> tf.Tensor:
    """The hardest triplets of a batch, as a compiled loss."""
    labels, z = gather([tf.reshape(labels, [-1]), tf.nn.l2_normalize(embedded, 1)])
    apart = 2 - 2 * tf.matmul(z, z, transpose_b=True)
    same = tf.cast(tf.equal(labels[:, None], labels[None]), z.dtype)
    farthest = tf.reduce_max(apart * same, 1)
    nearest = tf.reduce_min(apart + 9 * same, 1)
    return tf.reduce_mean(tf.nn.softplus(farthest - nearest))


def embedding() -> keras.Model:
    return keras.Sequential([keras.Input([6], **FLOAT64), *encoder().layers])


def cosine(y: Any, predicted: Any) -> tf.Tensor:
    """One minus the cosine of a batch's values: a quotient of means, one in a root."""
    y = tf.reshape(tf.cast(y, predicted.dtype), [-1])
    y, predicted = gather([y, predicted[:, 0]])
    size = tf.sqrt(tf.reduce_mean(y**2) * tf.reduce_mean(predicted**2) + 1e-3)
    return 1 - tf.reduce_mean(y * predicted) / size


# How a model is made, its compiled loss, and the arguments of fit.
Program = tuple[Callable[[], keras.Model], Any, tuple[Any, ...]]
PROGRAMS: dict[str, Program] = {
    "SimCLR": (SimCLR, None, ((X, OTHER),)),
    "of own rows": (OfOwnRows, None, ((X, OTHER),)),
    "CLIP": (CLIP, None, ((X, OTHER),)),
    "NNCLR": (NNCLR, None, ((X, OTHER),)),
    "VICReg": (vicreg, None, (X,)),
    "triplets": (embedding, triplets, (X, LABELS)),
    "cosine": (embedding, cosine, (X, X[:, 0])),
}

"""Learns features of handwritten digits without their labels: SimCLR.

The loss compares each view of an image with all other views of the batch, so the rows
of all towers are gathered. An image's noise is derived from a seed in the batch, so
that runs with equal seeds are equal.
"""

from gallery import devices, normal_rows, run

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

from tw_core.synchronized import gather  # plain Keras: no such line
from tw_keras import TowerModel  # plain Keras: no such line


class SimCLR(keras.Model):
    def __init__(self):
        super().__init__()
        hidden = layers.Dense(128, activation="relu")
        self.encoder = keras.Sequential([keras.Input([64]), hidden, layers.Dense(32)])
        self.projection = keras.Sequential([keras.Input([32]), layers.Dense(16)])
        self.tracker = keras.metrics.Mean("loss")

    def call(self, images):
        return self.encoder(images)

    def views(self, images, seeds):
        noise = normal_rows(
            seeds, self.optimizer.iterations, 2 * 64, self.compute_dtype
        )
        return [images + 0.4 * own for own in tf.split(noise, 2, axis=1)]

    def train_step(self, data):
        images, seeds = data
        with tf.GradientTape() as tape:
            views = [
                tf.nn.l2_normalize(self.projection(self.encoder(view)), axis=1)
                for view in self.views(images, seeds)
            ]
            views = gather(views)  # plain Keras: views
            loss = contrastive_loss(*views)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def contrastive_loss(first, second, temperature=0.2):
    z = tf.concat([first, second], 0)
    rows = tf.shape(first)[0]
    logits = tf.matmul(z, z, transpose_b=True) / temperature
    logits -= 1e9 * tf.eye(2 * rows, dtype=z.dtype)  # no view beside itself
    other = tf.concat([tf.range(rows, 2 * rows), tf.range(rows)], 0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(other, logits)
    return tf.reduce_mean(losses)


def make_model():
    return SimCLR()


def main(towers=2, epochs=12, rows=1797, seed=0):
    images = load_digits().data[:rows] / 16
    seeds = np.random.default_rng(seed).integers(0, 2**31 - 1, len(images))
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(optimizer=keras.optimizers.Adam(3e-3))
    options = {"batch_size": 64, "verbose": 0}
    return model.fit(images, seeds, epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

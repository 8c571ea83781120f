"""Learns a code of two numbers for handwritten digits: a variational autoencoder.

It has its own ``train_step``, in plain Keras. An image's noise is derived from a seed
in the batch, so that runs with equal seeds are equal.
"""

from gallery import devices, normal_rows, run

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

from tw_keras import TowerModel  # plain Keras: no such line

CODE = 2


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        hidden = layers.Dense(64, activation="relu")
        self.encoder = keras.Sequential(
            [keras.Input([64]), hidden, layers.Dense(2 * CODE)]
        )
        hidden = layers.Dense(64, activation="relu")
        self.decoder = keras.Sequential([keras.Input([CODE]), hidden, layers.Dense(64)])
        names = "loss", "drawing_loss"
        self.trackers = [keras.metrics.Mean(name) for name in names]

    def train_step(self, data):
        images, seeds = data
        noise = normal_rows(seeds, self.optimizer.iterations, CODE, self.compute_dtype)
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(images), 2, axis=1)
            drawn = self.decoder(mean + tf.exp(log_variance / 2) * noise)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(images, drawn)
            drawing = tf.reduce_mean(tf.reduce_sum(losses, 1))
            spread = tf.exp(log_variance) + mean**2 - 1 - log_variance
            loss = drawing + tf.reduce_mean(tf.reduce_sum(spread, 1)) / 2
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for tracker, value in zip(self.trackers, (loss, drawing)):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def make_model():
    return Autoencoder()


def main(towers=2, epochs=12, rows=1797, seed=0):
    images = load_digits().data[:rows] / 16
    seeds = np.random.default_rng(seed).integers(0, 2**31 - 1, len(images))
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(optimizer=keras.optimizers.Adam(3e-3))
    options = {"batch_size": 32, "verbose": 0}
    return model.fit(images, seeds, epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

"""Generates handwritten digits: a painter and a critic learn from each other.

Two models and two optimizers in a ``train_step`` of their own, in plain Keras. Noise is
derived from seeds in the batch, so that runs with equal seeds are equal.
"""

from gallery import devices, normal_rows, run

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

from tw_keras import TowerModel  # plain Keras: no such line

NOISE = 8


def network(inputs, outputs, activation):
    hidden = [layers.Dense(64), layers.LeakyReLU()]
    last = layers.Dense(outputs, activation=activation)
    return keras.Sequential([keras.Input([inputs]), *hidden, last])


class Players(keras.Model):
    def __init__(self):
        super().__init__()
        self.painter = network(NOISE, 64, "sigmoid")
        self.critic = network(64, 1, None)
        names = "painter_loss", "critic_loss"
        self.trackers = [keras.metrics.Mean(name) for name in names]

    def compile(self, painter_optimizer, critic_optimizer):
        super().compile()
        self.painter_optimizer = painter_optimizer
        self.critic_optimizer = critic_optimizer

    def train_step(self, data):
        images, seeds = data
        step = self.critic_optimizer.iterations
        noise = normal_rows(seeds, step, NOISE, self.compute_dtype)
        painted = self.painter(noise)

        own = self.critic.trainable_variables
        with tf.GradientTape() as tape:
            doubt = tf.nn.softplus(self.critic(painted)) + tf.nn.softplus(
                -self.critic(images)
            )
            critic_loss = tf.reduce_mean(doubt)
        self.critic_optimizer.apply(tape.gradient(critic_loss, own), own)

        own = self.painter.trainable_variables
        with tf.GradientTape() as tape:
            belief = tf.nn.softplus(-self.critic(self.painter(noise)))
            painter_loss = tf.reduce_mean(belief)
        self.painter_optimizer.apply(tape.gradient(painter_loss, own), own)

        for tracker, loss in zip(self.trackers, (painter_loss, critic_loss)):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def make_model():
    return Players()


def main(towers=2, epochs=12, rows=1797, seed=0):
    images = load_digits().data[:rows] / 16
    seeds = np.random.default_rng(seed).integers(0, 2**31 - 1, len(images))
    keras.utils.set_random_seed(seed)
    model = TowerModel(make_model, devices(towers))  # plain Keras: make_model()
    model.compile(
        painter_optimizer=keras.optimizers.Adam(1e-3, beta_1=0.5),
        critic_optimizer=keras.optimizers.Adam(5e-4, beta_1=0.5),
    )
    options = {"batch_size": 32, "verbose": 0}
    return model.fit(images, seeds, epochs=epochs, **options).history


if __name__ == "__main__":
    run(main, __file__)

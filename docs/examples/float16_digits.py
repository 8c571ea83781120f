"""Trains a float16 network on handwritten digits, and counts the gradients it loses.

The network's variables, activations and gradients are float16; the optimizer updates
float32 master copies. Without loss scaling, four in ten of the gradients with which the
backward pass starts end up too small for float16, and become zero:

    python float16_digits.py                 # scaled
    python float16_digits.py --no-scaling

The data is scikit-learn's digits, 1,797 images of 8 x 8 pixels.
"""

import argparse
import sys
from itertools import pairwise

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--towers", type=int, default=1)
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--no-scaling", action="store_true")
if __name__ == "__main__":  # --help and wrong options need no TensorFlow.
    parser.parse_args()

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tw_ampopt
import tw_core

LAYERS = (64, 128, 10)
BATCH = 256
GOAL = 0.97


class Network(tf.Module):
    """Dense layers, in float16 from the first to the last."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.weights = []
        for size, width in pairwise(LAYERS):
            kernel = random.standard_normal((size, width)) * np.sqrt(2 / size)
            self.weights.append(tf.Variable(kernel, dtype=tf.float16))
            self.weights.append(tf.Variable(tf.zeros(width, tf.float16)))

    def logits(self, images: tf.Tensor) -> tf.Tensor:
        x = tf.cast(images, tf.float16)
        for i in range(0, len(self.weights), 2):
            x = x @ self.weights[i] + self.weights[i + 1]
            if i + 2 < len(self.weights):
                x = tf.nn.relu(x)
        return x


def loss_of(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the mean cross-entropy; the sum over classes needs float32."""
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(losses)


class Training:
    """Towers' networks, the optimizer, and one step of both."""

    def __init__(self, num_towers: int, *, scaling: bool) -> None:
        self.towers = tw_core.towers(tw_core.devices.available_devices()[:num_towers])
        self.networks = tw_core.replicate(self.towers, lambda tower: Network(seed=0))
        self.optimizer = tw_ampopt.TowerOptimizer(
            [network.weights for network in self.networks],
            learning_rate=lambda updates: 0.01 * 0.99 ** tf.cast(updates, tf.float32),
            loss_scale=tw_ampopt.DynamicLossScale(growth_interval=100)
            if scaling
            else None,
            master_copies=True,
        )

    @tf.function
    def step(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        parts = [tf.split(part, len(self.towers)) for part in (images, labels)]
        return self.optimizer.apply(
            tw_core.map_towers(self._gradients, self.towers, *parts)
        )

    @tf.function
    def share_lost(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """Returns the share of the logits' gradients that only float32 can hold.

        The whole backward pass starts from these [images, 10] numbers; those that
        become zero in float16 do not reach any layer.
        """
        logits = self.networks[0].logits(images)
        exact = tf.cast(logits, tf.float32)
        with tf.GradientTape() as tape:
            tape.watch([logits, exact])
            losses = [loss_of(values, labels) for values in (logits, exact)]
            losses[0] = self.optimizer.apply_loss_scaling(losses[0])
        half, full = tape.gradient(losses, [logits, exact])
        lost = tf.logical_and(tf.equal(half, 0), tf.not_equal(full, 0))
        return tf.reduce_mean(tf.cast(lost, tf.float32))

    @tf.function
    def accuracy(self, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        guessed = tf.argmax(self.networks[0].logits(images), -1)
        return tf.reduce_mean(tf.cast(tf.equal(guessed, labels), tf.float32))

    def _gradients(
        self, tower: tw_core.Tower, images: tf.Tensor, labels: tf.Tensor
    ) -> list[tf.Tensor]:
        network = self.networks[tower.index]
        with tf.GradientTape() as tape:
            loss = loss_of(network.logits(images), labels)
            loss = self.optimizer.apply_loss_scaling(loss)
        return tape.gradient(loss, network.weights)


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns training images and labels, then test images and labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32)
    labels = labels[order].astype(np.int64)
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def train(num_towers: int = 1, epochs: int = 40, *, scaling: bool = True) -> dict:
    """Trains, and returns accuracy, share of gradients lost, and statistics."""
    images, labels, test_images, test_labels = digits()
    training = Training(num_towers, scaling=scaling)
    random = np.random.default_rng(1)
    for epoch in range(1, epochs + 1):
        order = random.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            training.step(tf.constant(images[batch]), tf.constant(labels[batch]))
        result = {
            "accuracy": float(training.accuracy(test_images, test_labels)),
            "lost": float(training.share_lost(images[:BATCH], labels[:BATCH])),
            **{k: float(v) for k, v in training.optimizer.statistics().items()},
        }
        if epoch % 10 == 0 or epoch == epochs:
            log2 = result.get("loss_scaling_log2", 0.0)
            print(
                f"epoch {epoch:3}  accuracy {result['accuracy']:.4f}  gradients lost "
                f"{result['lost']:6.1%}  scale 2^{log2:.0f}  skipped "
                f"{result['skipped_updates']:.0f}"
            )
    return result


def main() -> None:
    options = parser.parse_args()
    for name in ("towers", "epochs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(options, name)}")
    if BATCH % options.towers:
        parser.error(f"--towers must divide {BATCH} images; got {options.towers}")
    if not tf.config.list_physical_devices("GPU"):
        tw_core.use_logical_cpus(options.towers)
    if len(devices := tw_core.devices.available_devices()) < options.towers:
        parser.error(f"--towers {options.towers} is more than {', '.join(devices)}")
    result = train(options.towers, options.epochs, scaling=not options.no_scaling)
    if not options.no_scaling and result["accuracy"] < GOAL:
        sys.exit(f"The accuracy {result['accuracy']:.4f} is below {GOAL}.")


if __name__ == "__main__":
    main()

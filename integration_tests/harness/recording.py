"""A layer that records its largest inputs, as Keras's float8 layers do.

Without their rounding, so that records and weights equal those of one device.
"""

from typing import Any

import keras
import tensorflow as tf


class Recording(keras.layers.Layer):
    """Keeps the largest inputs of the last five updates in a variable."""

    def build(self, _: Any) -> None:
        self.largest = self.add_weight(shape=[5], initializer="zeros", name="largest")
        self.largest.overwrite_with_gradient = True

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def record(x: Any, largest: Any) -> Any:
            def gradients(upstream: Any) -> Any:
                new = tf.reduce_max(tf.abs(x))[tf.newaxis]
                return upstream, tf.concat([new, largest[:-1]], 0)

            return tf.identity(x), gradients

        return record(x, self.largest.value)

"""Models that a seed chooses, for tests that compare ways to train them.

It chooses the number of towers, layers of an image's, a text's and a vector's branch,
the optimizer, losses and weights, and what ``TowerModel`` and ``fit`` are given.
"""

from functools import cached_property, partial

import keras
import numpy as np

layers, kinds = keras.layers, keras.optimizers
ROWS, WORDS, WIDTH = 22, 9, 4
# With these epsilons no step is the sign of a small gradient, which rounding decides.
OPTIMIZERS = {
    "momentum": partial(kinds.SGD, momentum=0.9, nesterov=True),
    "adam": partial(kinds.Adam, epsilon=1e-2),
    "averages": partial(kinds.AdamW, epsilon=1e-2, use_ema=True, weight_decay=0.1),
    "accumulating": partial(kinds.Adam, epsilon=1e-2, gradient_accumulation_steps=2),
    "clipped": partial(kinds.RMSprop, epsilon=1e-2, global_clipnorm=0.1),
    "each clipped": partial(kinds.SGD, clipnorm=0.05),
    "scaled": lambda rate: kinds.LossScaleOptimizer(
        kinds.Adam(rate, epsilon=1e-2), initial_scale=2.0**10, dynamic_growth_steps=3
    ),
    "schedule": lambda rate: kinds.SGD(
        kinds.schedules.CosineDecay(rate, 5), momentum=0.5
    ),
    "whole variables": partial(kinds.Adagrad, epsilon=1e-2, clipvalue=0.1),
}
OF_IMAGES = ("convolution", "depthwise", "pooled", "averaged", "grouped", "normalised")
OF_WORDS = ("recurrent", "attended", "layer_normalised", "scaled_by_row", "convolved")
OF_VECTORS = ("dense", "residual", "twice", "gated", "normalised", "counted", "frozen")


class Counts(layers.Layer):
    """Computes by a number of steps, which it counts."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x, training=None):
        if training:
            self.count.assign_add(1.0)
        return x * self.scale + keras.ops.sin(self.count.value)


class Drawn:
    """What a seed chooses."""

    def __init__(self, seed):
        self.choices = np.random.default_rng(seed)
        self.num_towers = 1 + seed % 4
        self.optimizer = self.one_of(OPTIMIZERS)
        self.inputs = [n for n in "iwv" if self.choices.random() < 0.6] or ["v"]
        self.kinds = {
            name: self.some(own)
            for name, own in zip("iwv", (OF_IMAGES, OF_WORDS, OF_VECTORS), strict=True)
        }
        self.loss = self.one_of(["mse", "classes", "huber"])
        self.is_weighted = self.choices.random() < 0.3
        self.options = {
            "variables": self.one_of(["replicated", "sharded", "parameter_server"])
        }
        used = {kind for name in self.inputs for kind in self.kinds[name]}
        if used & {"counted", "normalised"} and "server" in self.options["variables"]:
            self.options = {}  # XLA writes no variables of another device.
        self.has_several_steps = self.one_of([False, False, True])
        self.batch_size = int(self.choices.integers(3, 12))
        self.activation = self.one_of(["tanh", "gelu", "softplus"])
        self.regularizer = self.one_of([None, None, "l2"])

    def one_of(self, names):
        names = list(names)
        return names[self.choices.integers(len(names))]

    def some(self, names):
        return [self.one_of(names) for _ in range(self.choices.integers(1, 4))]

    # Layers

    def convolution(self, x):
        return layers.Conv2D(3, 2, padding="same", activation=self.activation)(x)

    def depthwise(self, x):
        return layers.DepthwiseConv2D(2, padding="same")(x)

    def pooled(self, x):
        return layers.MaxPooling2D(2, padding="same")(x)

    def averaged(self, x):
        return layers.UpSampling2D()(layers.AveragePooling2D(2, padding="same")(x))

    def grouped(self, x):
        return layers.GroupNormalization(1, epsilon=1e-2)(x)

    def normalised(self, x):
        norm = layers.BatchNormalization(synchronized=True, momentum=0.7, epsilon=0.1)
        return norm(x)

    def recurrent(self, x):
        return layers.GRU(WIDTH, return_sequences=True)(x)

    def attended(self, x):
        return layers.Add()([x, layers.MultiHeadAttention(2, 3)(x, x)])

    def layer_normalised(self, x):
        return layers.LayerNormalization(epsilon=1e-2)(x)

    def scaled_by_row(self, x):
        return layers.Multiply()([x, layers.Dense(1, "sigmoid")(x)])

    def convolved(self, x):
        return layers.Conv1D(WIDTH, 2, padding="causal")(x)

    def dense(self, x):
        regularizer = self.regularizer
        return layers.Dense(7, self.activation, kernel_regularizer=regularizer)(x)

    def residual(self, x):
        inner = keras.Sequential([layers.Dense(5, "tanh"), layers.Dense(x.shape[-1])])
        return layers.Add()([x, inner(x)])

    def twice(self, x):
        own = layers.Dense(x.shape[-1], "tanh", activity_regularizer=self.regularizer)
        return own(own(x))

    def gated(self, x):
        return layers.Multiply()([layers.Dense(6)(x), layers.Dense(6, "sigmoid")(x)])

    def counted(self, x):
        return Counts()(x)

    def frozen(self, x):
        return layers.Dense(80, "tanh", trainable=False)(x)

    # Models

    def made(self):
        inputs, ends = {}, []
        if "i" in self.inputs:
            inputs["i"] = x = keras.Input([6, 6, 2], name="i")
            ends.append(layers.Flatten()(self.through("i", x)))
        if "w" in self.inputs:
            inputs["w"] = x = keras.Input([5], dtype="int32", name="w")
            x = layers.Embedding(WORDS, WIDTH)(x)
            ends.append(layers.GlobalAveragePooling1D()(self.through("w", x)))
        if "v" in self.inputs:
            inputs["v"] = x = keras.Input([6], name="v")
            ends.append(self.through("v", x))
        x = layers.Concatenate()(ends) if len(ends) > 1 else ends[0]
        return keras.Model(inputs, layers.Dense(3, name="out")(x))

    def through(self, name, x):
        for kind in self.kinds[name]:
            x = getattr(self, kind)(x)
        return x

    @cached_property
    def data(self):
        random = np.random.default_rng(0)
        x = {
            "i": random.normal(size=[ROWS, 6, 6, 2]).astype("f"),
            "w": random.integers(0, WORDS, [ROWS, 5]).astype("int32"),
            "v": random.normal(size=[ROWS, 6]).astype("f"),
        }
        y = random.normal(size=[ROWS, 3]).astype("f")
        if self.loss == "classes":
            y = random.integers(0, 3, ROWS)
        weights = random.random(ROWS).astype("f") if self.is_weighted else None
        return {name: x[name] for name in self.inputs}, y, weights

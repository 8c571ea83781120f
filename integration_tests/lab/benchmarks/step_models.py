"""Training steps of Keras models of real size, against MirroredStrategy.

Every contender trains the same model from the same weights on the same shards, held in
memory, with batch normalisation per tower, as in MirroredStrategy. After two steps all
must have the same variables.
"""

from functools import partial
from typing import Any

import keras
import networks
import numpy as np
import tensorflow as tf
import training
from racing import Contender, Timing, checked, race
from training import MIRRORED as PEER
from training import REPLICATED

import tw_core

KINDS = (REPLICATED, "flat", "sharded", "flat sharded")
CHECKED_STEPS = 2


def transformer() -> Any:
    """Six blocks of width 128 with four heads, over 32 tokens."""
    tokens = keras.Input((32, 128))
    pooled = networks.attended(tokens, 6, 512)
    return keras.Model(tokens, keras.layers.Dense(10)(pooled))


MODELS = {
    "ResNet-50, 64 x 64, batch 8": (partial(networks.resnet, 10), (8, 64, 64, 3)),
    "transformer of 6 blocks, batch 16": (transformer, (16, 32, 128)),
}


def new_optimizer() -> Any:
    return keras.optimizers.Adam(1e-4)


def run_model(title: str, towers: int, rounds: int) -> list[Timing]:
    """Races the steps of one model."""
    devices = tw_core.use_logical_cpus(towers)
    make, shape = MODELS[title]
    random = np.random.default_rng(0)
    x = random.standard_normal(shape).astype(np.float32)
    y = random.standard_normal((shape[0], 10)).astype(np.float32)
    made = partial(networks.seeded, make), training.squared_error, new_optimizer
    strategy = tf.distribute.MirroredStrategy(devices)
    step, model = training.mirrored_step(strategy, *made)
    peer = partial(step, *training.mirrored_shards(strategy, x, y))
    for _ in range(CHECKED_STEPS):
        peer()
    expected = training.values_of(model)
    found = [Contender(PEER, peer, config="tf.function, default")]
    shards = training.shards_of(devices, x, y)
    for kind in KINDS:
        step, model = training.function_step(devices, *made, kind=kind)
        found.append(
            checked(
                kind,
                partial(step, *shards),
                partial(training.values_of, model),
                expected,
                steps=CHECKED_STEPS,
                # Adam moves every weight by about its rate, whatever its gradient's
                # size.
                atol=5e-4,
                config="tf.function, default",
            )
        )
    return race(f"{title}, K = {towers}", found, peer=PEER, rounds=rounds)

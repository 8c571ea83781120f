"""Networks whose first step is timed, and their data: four rows a tower.

Timed is the first call minus a later one: tracing, the graph optimizer, and objects
created once.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from racing import Report, Timing, race_by

from tw_doctor._machine.race import seconds_of

ROWS, STEPS, LATER = 4, 10, 3
layers = keras.layers


def dense(
    depth: int = 2, width: int = 64, inputs: int = 32, outputs: int = 1
) -> keras.Model:
    """Layers of one width."""
    hidden = [layers.Dense(width, "relu") for _ in range(depth)]
    return keras.Sequential([keras.Input([inputs]), *hidden, layers.Dense(outputs)])


def convolutional() -> keras.Model:
    """Twelve convolutions with batch normalisation."""
    x = inputs = keras.Input([32, 32, 3])
    for filters in (16, 32, 64):
        for _ in range(4):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.MaxPool2D()(x)
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def attended(x: Any, blocks: int, wide: int) -> Any:
    """Attention blocks with four heads and hidden layers of a width, then the mean."""
    width = x.shape[-1]
    for _ in range(blocks):
        own = layers.MultiHeadAttention(4, width // 4)(x, x)
        x = layers.LayerNormalization()(x + own)
        hidden = layers.Dense(wide, "gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
    return layers.GlobalAveragePooling1D()(x)


def attention() -> keras.Model:
    """Three attention blocks of width 64."""
    inputs = keras.Input([32], dtype="int32")
    x = attended(layers.Embedding(1000, 64)(inputs), 3, 128)
    return keras.Model(inputs, layers.Dense(1)(x))


def resnet(outputs: int = 1) -> keras.Model:
    """ResNet-50 without its top, on images of 64 x 64."""
    inputs = keras.Input([64, 64, 3])
    base = keras.applications.ResNet50(
        weights=None, include_top=False, input_tensor=inputs, pooling="avg"
    )
    return keras.Model(inputs, layers.Dense(outputs)(base.output))


NETWORKS = {
    "dense": dense,
    "convolutional": convolutional,
    "attention": attention,
    "resnet": resnet,
}


def seeded(make: Callable[[], keras.Model]) -> keras.Model:
    """Makes a network, of equal weights every time."""
    keras.utils.set_random_seed(0)
    return make()


def data(name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows for a network, and a number to learn for each."""
    random = np.random.default_rng(0)
    if name == "attention":
        x = random.integers(0, 1000, [rows, 32]).astype(np.int32)
        return x, x[:, :1].astype(np.float32) / 1000
    shape = {"dense": [32], "convolutional": [32, 32, 3], "resnet": [64, 64, 3]}[name]
    x = random.normal(size=[rows, *shape]).astype(np.float32)
    return x, x.reshape(rows, -1).mean(1, keepdims=True)


def race_first(
    title: str,
    makers: dict[str, Callable[[], Callable[[], Any]]],
    peer: str,
    rounds: int,
) -> tuple[list[Timing], dict[str, float]]:
    """Races first calls; returns their rows, and the medians of later calls."""
    later: dict[str, list[float]] = {name: [] for name in makers}

    def first(name: str) -> float:
        run = makers[name]()
        seconds = seconds_of(run)
        later[name].append(statistics.median(seconds_of(run) for _ in range(LATER)))
        return seconds - later[name][-1]

    timers = {name: partial(first, name) for name in makers}
    timings = race_by(title, timers, peer=peer, rounds=rounds)
    return timings, {name: statistics.median(own) for name, own in later.items()}


def report_first(
    report: Report,
    raced: tuple[list[Timing], dict[str, float]],
    peer: str,
    targets: dict[tuple[str, str], float],
) -> None:
    """Keeps the rows of ``race_first``, and notes targets of (ours, theirs)."""
    timings, later = raced
    report.add(timings, peer)
    for name, seconds in later.items():
        print(f"  {name}: later {seconds * 1e3:.1f} ms")
    for (ours, theirs), at_most in targets.items():
        report.compare(timings, ours, theirs, at_most)
    if {"once", "each"} <= later.keys():
        work = f"{timings[0].work}: later, once / each"
        report.target(work, later["once"] / later["each"], 1.05)

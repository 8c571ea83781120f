"""Training steps of a network with batch normalisation over all towers.

Every contender trains the same small convolutional network, with four normalised
layers, from the same weights on the same shards, held in memory. After two steps the
synchronised ones must have the variables of one device on the whole batch. The first
call, which traces, is reported as well.

``collectives`` computes each sum at run time, with an all-reduce: the baseline for
``tw_core.synchronized``.
"""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import training
from racing import Contender, Report, Timing, checked, paired_ratio, race

import tw_core
import tw_reduce
from tw_core.synchronized import synchronized_layers

OPTIONS = {"rounds": 31, "towers": [2, 4]}

PEER = "MirroredStrategy, synchronised"
OWN_ROWS = "towers, own rows"
OURS = "towers, synchronised"
COLLECTIVES = "towers, collectives"
CHECKED_STEPS = 2
TOLERANCE = 2e-5  # of variables of order one, in float32 after two steps
KEY = 1 << 20  # of the collectives, far from TensorFlow's own
SHAPE = (32, 16, 16, 8)


def new_model(*, synchronized: bool) -> Any:
    keras.utils.set_random_seed(0)
    layers: list[Any] = [keras.Input(SHAPE[1:])]
    for filters, strides in ((16, 1), (16, 2), (32, 1), (32, 2)):
        layers += [
            keras.layers.Conv2D(filters, 3, strides, "same", use_bias=False),
            keras.layers.BatchNormalization(synchronized=synchronized),
            keras.layers.ReLU(),
        ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def new_optimizer() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


Built = tuple[Callable[[], Any], Any]


class Collectives(tf.distribute.ReplicaContext):
    """A replica context in which the towers' sums meet at run time."""

    def __init__(self, index: int, total: int, key: int):
        super().__init__(tf.distribute.get_strategy(), index)
        self.total, self.key = total, key
        self.counts: Counter[str] = Counter()

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        self.counts["forward"] += 1
        number = 2 * self.counts["forward"]

        @tf.custom_gradient
        def summed(x: Any) -> Any:
            return self.meet(x, number), lambda dy: self.meet(dy, number + 1)

        return summed(value)

    def meet(self, x: Any, number: int) -> Any:
        return tf.raw_ops.CollectiveReduce(
            input=x,
            group_size=self.total,
            group_key=self.key,
            instance_key=self.key + number,
            merge_op="Add",
            final_op="Id",
            subdiv_offsets=[0],
        )


def towers_step(kind: str, devices: list[str], x: np.ndarray, y: np.ndarray) -> Built:
    def map_towers(run: Any, towers: Any, *args: Any) -> Any:
        def beside_others(tower: Any, *own: Any) -> Any:
            if kind != COLLECTIVES:
                return run(tower, *own)
            with Collectives(tower.index, len(towers), KEY):
                return run(tower, *own)

        with synchronized_layers() if kind == OURS else nullcontext():
            return tw_core.map_towers(beside_others, towers, *args)

    step, model = training.function_step(
        devices,
        partial(new_model, synchronized=kind != OWN_ROWS),
        training.squared_error,
        new_optimizer,
        reduce=partial(tw_reduce.sum_balanced, devices=devices),
        map_towers=map_towers,
    )
    return partial(step, *training.shards_of(devices, x, y)), model


def mirrored_step(
    strategy: Any, x: np.ndarray, y: np.ndarray, *, synchronized: bool
) -> Built:
    make = partial(new_model, synchronized=synchronized)
    step, model = training.mirrored_step(
        strategy, make, training.squared_error, new_optimizer
    )
    return partial(step, *training.mirrored_shards(strategy, x, y)), model


def values_of(model: Any) -> list[np.ndarray]:
    return [np.asarray(v.numpy()) for v in model.variables]


def contender(name: str, built: Built, want: list[np.ndarray]) -> Contender:
    """Runs a step until it is checked; says what the first call took."""
    step, model = built
    start = time.perf_counter()
    step()
    print(f"  {name}: first call {time.perf_counter() - start:.2f} s", flush=True)
    read = partial(values_of, model) if want else list
    within = {"rtol": TOLERANCE, "atol": TOLERANCE}
    return checked(name, step, read, want, steps=CHECKED_STEPS - 1, **within)


def run_cell(towers: int, rounds: int) -> list[Timing]:
    """Races the steps on a number of towers."""
    devices = tw_core.use_logical_cpus(towers)
    random = np.random.default_rng(0)
    x = random.standard_normal(SHAPE).astype(np.float32)
    y = random.standard_normal((SHAPE[0], 10)).astype(np.float32)
    step, model = towers_step(OURS, devices[:1], x, y)
    for _ in range(CHECKED_STEPS):
        step()
    want = values_of(model)
    # One strategy: two over the same devices use each other's keys.
    strategy = tf.distribute.MirroredStrategy(devices)
    mirrored = partial(mirrored_step, strategy, x, y)
    contenders = [
        contender(PEER, mirrored(synchronized=True), want),
        contender("MirroredStrategy, own rows", mirrored(synchronized=False), []),
        contender(OWN_ROWS, towers_step(OWN_ROWS, devices, x, y), []),
        contender(OURS, towers_step(OURS, devices, x, y), want),
        contender(COLLECTIVES, towers_step(COLLECTIVES, devices, x, y), want),
    ]
    work = f"4 normalised layers, batch {SHAPE[0]}, {towers} towers"
    return race(work, contenders, peer=PEER, rounds=rounds)


def main(options: Any, report: Report) -> None:
    """Races synchronised steps."""
    for towers in options.towers:
        timings = report.race(PEER, run_cell, towers, options.rounds)
        for other in (OWN_ROWS, COLLECTIVES):
            print(f"  {OURS} / {other}: {paired_ratio(timings, OURS, other):.3f}")

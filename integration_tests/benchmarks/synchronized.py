"""Training steps of a network with batch normalisation over all towers.

Every contender trains the same small convolutional network, with four normalised
layers, from the same weights on the same shards, held in memory. After two steps those
that are synchronised must have the variables of one device on the whole batch. The
first call, which traces, is told as well.

``collectives`` has the sums met at run time, by an all-reduce for each; it is what
``tw_core.synchronized`` was measured against.
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
from harness import Contender, Report, Timing, paired_ratio, race

import tw_builders
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


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


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


def towers_step(kind: str, towers: int, x: np.ndarray, y: np.ndarray) -> Built:
    ours = tw_core.towers([f"/cpu:{k}" for k in range(towers)])
    synchronized = kind != OWN_ROWS
    models = tw_core.replicate(ours, lambda _: new_model(synchronized=synchronized))
    optimizers = tw_builders.make_optimizers(ours, new_optimizer)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    devices = [tower.device for tower in ours]
    reduce = tw_reduce.mean(partial(tw_reduce.sum_balanced, devices=devices))

    def tower_pairs(tower: Any, model: Any, x: Any, y: Any) -> Any:
        collective = Collectives(tower.index, towers, KEY)
        with (
            tf.GradientTape() as tape,
            collective if kind == COLLECTIVES else nullcontext(),
        ):
            loss = loss_of(model, x, y)
        variables = model.trainable_variables
        return list(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> None:
        with synchronized_layers() if kind == OURS else nullcontext():
            pairs = tw_core.map_towers(tower_pairs, ours, models, x, y)
        grads, _ = tw_core.split_grad_list(pairs)
        tw_builders.apply_gradients(ours, reduce(grads), models, optimizers)

    def shards(whole: np.ndarray) -> list[tf.Tensor]:
        parts = []
        for tower, part in zip(ours, np.split(whole, towers), strict=True):
            with tf.device(tower.device):
                parts.append(tf.constant(part))
        return parts

    return partial(step, shards(x), shards(y)), models[0]


def mirrored_step(
    strategy: Any, x: np.ndarray, y: np.ndarray, *, synchronized: bool
) -> Built:
    towers = strategy.num_replicas_in_sync
    with strategy.scope():
        model = new_model(synchronized=synchronized)
        optimizer = new_optimizer()
        optimizer.build(model.trainable_variables)
    shards = [
        strategy.experimental_distribute_values_from_function(
            lambda context, own=own: tf.constant(own[context.replica_id_in_sync_group])
        )
        for own in (np.split(x, towers), np.split(y, towers))
    ]

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y) / towers
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> None:
        strategy.run(replica_step, args=(x, y))

    return partial(step, *shards), model


def one_device(x: np.ndarray, y: np.ndarray) -> Built:
    return towers_step(OURS, 1, x, y)


def values_of(model: Any) -> list[np.ndarray]:
    return [np.asarray(v.numpy()) for v in model.variables]


def contender(name: str, built: Built, want: list[np.ndarray] | None) -> Contender:
    """Runs a step until it is checked; says what the first call took."""
    step, model = built
    start = time.perf_counter()
    step()
    print(f"  {name}: first call {time.perf_counter() - start:.2f} s", flush=True)
    for _ in range(CHECKED_STEPS - 1):
        step()
    if want is not None:
        for got, value in zip(values_of(model), want, strict=True):
            np.testing.assert_allclose(got, value, rtol=TOLERANCE, atol=TOLERANCE)
    return Contender(name, step)


def run_cell(towers: int, rounds: int) -> list[Timing]:
    """Races the steps on a number of towers."""
    tw_core.use_logical_cpus(towers)
    random = np.random.default_rng(0)
    x = random.standard_normal(SHAPE).astype(np.float32)
    y = random.standard_normal((SHAPE[0], 10)).astype(np.float32)
    step, model = one_device(x, y)
    for _ in range(CHECKED_STEPS):
        step()
    want = values_of(model)
    # One strategy: two over the same devices use each other's keys.
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{k}" for k in range(towers)])
    mirrored = partial(mirrored_step, strategy, x, y)
    contenders = [
        contender(PEER, mirrored(synchronized=True), want),
        contender("MirroredStrategy, own rows", mirrored(synchronized=False), None),
        contender(OWN_ROWS, towers_step(OWN_ROWS, towers, x, y), None),
        contender(OURS, towers_step(OURS, towers, x, y), want),
        contender(COLLECTIVES, towers_step(COLLECTIVES, towers, x, y), want),
    ]
    work = f"4 normalised layers, batch {SHAPE[0]}, {towers} towers"
    return race(work, contenders, peer=PEER, rounds=rounds)


def main(options: Any, report: Report) -> None:
    """Races synchronised steps."""
    for towers in options.towers:
        timings = report.race(PEER, run_cell, towers, options.rounds)
        for other in (OWN_ROWS, COLLECTIVES):
            print(f"  {OURS} / {other}: {paired_ratio(timings, OURS, other):.3f}")

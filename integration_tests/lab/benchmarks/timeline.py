"""The overhead of recording a step, and the share of the step that it explains.

Every work trains with and without recording, in turn in one process; the first steps
inside a recorder are only timed. Steps take over 20 ms on two cores; recording may add
5 %.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import training

import tw_builders
import tw_core
import tw_doctor
import tw_keras
import tw_reduce
from tw_doctor import explained

OPTIONS = {"rounds": 11, "works": "timeline.WORKS"}

v1 = tf.compat.v1
WIDTH, LAYERS, ROWS = 1024, 6, 128
NUM_STEPS = 8


def make_towers() -> list[Any]:
    return tw_core.towers(tw_core.use_logical_cpus(2))


def make_model() -> Any:
    hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
    model = [keras.Input([WIDTH]), *hidden, keras.layers.Dense(8)]
    return keras.Sequential(model)


def in_function() -> Callable[[Any], None]:
    devices = [tower.device for tower in make_towers()]
    step, _ = training.function_step(
        devices,
        make_model,
        training.squared_error,
        partial(keras.optimizers.SGD, 1e-3, momentum=0.9),
        reduce=tw_reduce.all_reduce(devices),
    )
    shards = [[tf.ones([ROWS, size])] * len(devices) for size in (WIDTH, 8)]

    def take(steps: Any) -> None:
        with steps.step():
            step(*shards)

    return take


def in_session(num_small: int, *, by_run: bool) -> Callable[[Any], None]:
    """With ``num_small`` more variables of 16 elements: many operations."""
    towers = make_towers()
    builder = tw_builders.SyncMultiGPUReplicatedBuilder([t.device for t in towers])

    def tower() -> Any:
        x = tf.ones([ROWS, WIDTH])
        for n in range(LAYERS):
            x = tf.nn.relu(x @ v1.get_variable(f"w{n}", [WIDTH, WIDTH]))
        loss = tf.reduce_mean(x**2)
        for n in range(num_small):
            loss += tf.reduce_sum(v1.get_variable(f"s{n}", [16]) ** 2)
        own = tw_core.get_current_tower_context().get_collection_in_tower(
            v1.GraphKeys.TRAINABLE_VARIABLES
        )
        return list(zip(tf.gradients(loss, own), own, strict=True))

    with tf.Graph().as_default():
        new = partial(v1.train.MomentumOptimizer, 1e-3, 0.9)
        session, train_op, _ = training.session_step(builder, tower, new)

    def take(steps: Any) -> None:
        if by_run:
            steps.run(session, train_op)
        else:
            with steps.step():
                session.run(train_op)

    return take


def in_fit() -> Callable[[Any], None]:
    devices = [tower.device for tower in make_towers()]
    model = tw_keras.TowerModel(make_model, devices)
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
    x, y = np.ones([2 * ROWS, WIDTH], np.float32), np.ones([2 * ROWS, 8], np.float32)
    data = tf.data.Dataset.from_tensors((x, y)).repeat(4 * NUM_STEPS)

    def take_all(steps: Any) -> None:
        model.fit(data, epochs=1, verbose=0, callbacks=[steps.keras_callback()])

    return take_all


WORKS: dict[str, Callable[[], Callable[[Any], None]]] = {
    "tf.function": in_function,
    "session, by the profiler": partial(in_session, 0, by_run=False),
    "session, by run": partial(in_session, 0, by_run=True),
    "session with 300 small variables, by run": partial(in_session, 300, by_run=True),
    "fit of a TowerModel": in_fit,
}


def measure(name: str, rounds: int) -> tuple[float, float, float]:
    """Returns milliseconds of a step, what recording adds, the least explained."""
    take = WORKS[name]()
    lengths, costs, shares = [], [], []
    for _ in range(rounds):
        with tw_doctor.record_steps(NUM_STEPS) as steps:
            for _ in range(1 if name.startswith("fit") else 2 * NUM_STEPS):
                take(steps)
        told = steps.summary()
        lengths.append(told.ms)
        costs.append(told.cost or 0.0)
        shares += [explained(step) for step in steps.steps]
    return median(lengths), median(costs), min(shares)


def main(options: Any, _: object) -> None:
    """Prints a row for each work."""
    print("| work | step, ms | recording adds | explained, at least |")
    print("|---|---|---|---|")
    for name in options.works:
        ms, cost, share = measure(name, options.rounds)
        print(f"| {name} | {ms:.1f} | {cost:+.1%} | {share:.1%} |", flush=True)

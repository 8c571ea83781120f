"""Keras's ``fit`` over towers, under MirroredStrategy and on one device.

Timed are the first epoch minus a later one, a later epoch, and the time that ``fit``
adds to the steps alone. Before a work is timed, all contenders must have the same
losses.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import networks
import numpy as np
import racing
import tensorflow as tf
from racing import Contender, Report, Timing, in_own_process, race

import tw_core
from tw_doctor._machine.race import seconds_of
from tw_keras import TowerModel
from tw_reduce import all_reduce, mean

OPTIONS = {
    "rounds": 9,
    "towers": [2, 4],
    "works": "fit.WORKS",
    "networks": ["dense", "convolutional", "attention"],
    "first_towers": [4, 8],
}

PEER = "MirroredStrategy"
AT_MOST = 0.33
RTOL = 1e-5 if racing.DEVICE == "cpu" else 1e-3  # GPUs add in any order
STEPS, BATCH = 100, 32
NO_INPUT = "replicated, without input"
layers = keras.layers


def convolutional() -> keras.Model:
    """Two convolutions on images of 8 x 8."""
    return keras.Sequential(
        [
            keras.Input([64]),
            layers.Reshape([8, 8, 1]),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


WORKS = {
    "small": partial(networks.dense, 2, 64, 64, 10),
    "wide": partial(networks.dense, 6, 512, 64, 10),
    "convolutional": convolutional,
}


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns rows like the digits' images, and their labels."""
    random = np.random.default_rng(0)
    x = random.random([STEPS * BATCH, 64], np.float32)
    return x, random.integers(0, 10, STEPS * BATCH)


def compiled(model: keras.Model, values: Any, **options: Any) -> keras.Model:
    """Gives a model the values, and compiles it."""
    model.set_weights(values)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # With an epsilon of 1e-7 Adam makes noise of rounding.
    adam = keras.optimizers.Adam(epsilon=1e-3)
    model.compile(adam, loss, jit_compile=False, **options)
    return model


def epoch(model: keras.Model) -> Callable[[], list[float]]:
    """Returns what trains for one epoch, and its loss."""
    x, y = data()

    def run() -> list[float]:
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return [float(loss) for loss in history.history["loss"]]

    return run


def fed_from_memory(model: keras.Model) -> Callable[[], None]:
    """Returns what trains for an epoch on one batch, so that there is no input."""
    x, y = data()
    batch = (tf.constant(x[:BATCH]), tf.constant(y[:BATCH]))
    dataset = tf.data.Dataset.from_tensors(batch).repeat(STEPS)

    def run() -> None:
        model.fit(dataset, verbose=0)

    return run


def bare(model: keras.Model) -> Callable[[], None]:
    """Returns what makes the steps of an epoch without ``fit``."""
    x, y = data()
    batches = list(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    spec = (tf.TensorSpec([None, 64], tf.float32), tf.TensorSpec([None], tf.int64))
    step = tf.function(model.train_step, autograph=False, input_signature=[spec])

    def run() -> None:
        for batch in batches:
            step(batch)

    return run


def run_cell(name: str, towers: int, rounds: int) -> list[Timing]:
    """Races epochs at one number of towers."""
    devices = racing.use_devices(towers)
    make = WORKS[name]
    values = make().get_weights()
    with tf.distribute.MirroredStrategy(devices).scope():
        mirrored = compiled(make(), values)
    models = {
        PEER: mirrored,
        "one device": compiled(make(), values),
        "replicated": compiled(TowerModel(make, devices), values),
        "replicated, 10 steps per execution": compiled(
            TowerModel(make, devices), values, steps_per_execution=10
        ),
        "sharded": compiled(TowerModel(make, devices, variables="sharded"), values),
    }
    epochs = {title: epoch(model) for title, model in models.items()}
    want = epochs["one device"]()
    for title, run in epochs.items():
        if title != "one device":
            np.testing.assert_allclose(run(), want, rtol=RTOL, err_msg=title)
    bare_steps = {
        "bare steps, one device": bare(models["one device"]),
        "bare steps, replicated": bare(models["replicated"]),
    }
    bare_steps[NO_INPUT] = fed_from_memory(models["replicated"])
    for run_bare in bare_steps.values():
        run_bare()
    contenders = [
        Contender(title, run) for title, run in {**epochs, **bare_steps}.items()
    ]
    title = f"epoch of {STEPS} steps, {name}, K = {towers}"
    return race(
        title, contenders, peer=PEER, rounds=rounds, timer=lambda c: seconds_of(c.run)
    )


def run_weights(name: str, towers: int, rounds: int) -> list[Timing]:
    """Races a step with means over towers and with means over rows."""
    devices = racing.use_devices(towers)
    models = tw_core.replicate(tw_core.towers(devices), lambda _: WORKS[name]())
    x, y = data()
    parts = [tf.constant(own) for own in np.array_split(x[: towers * 32], towers)]
    labels = [tf.constant(own) for own in np.array_split(y[: towers * 32], towers)]
    lists = [model.trainable_variables for model in models]
    ours = tw_core.towers(devices)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def gradients(_: Any, model: Any, x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x))
        return tape.gradient(loss, model.trainable_variables)

    def step(weighted: bool) -> Callable[[], Any]:
        @tf.function(
            input_signature=[
                [tf.TensorSpec([None, 64])] * towers,
                [tf.TensorSpec([None], tf.int64)] * towers,
            ],
            autograph=False,
        )
        def run(xs: Any, ys: Any) -> Any:
            weights = [tf.shape(own)[0] for own in xs] if weighted else None
            grads = tw_core.map_towers(gradients, ours, models, xs, ys)
            for own, variables in zip(
                mean(all_reduce(devices), weights=weights)(grads), lists, strict=True
            ):
                for grad, variable in zip(own, variables, strict=True):
                    variable.assign(variable.value - 0.01 * grad)
            return tf.constant(0)

        return lambda: run(parts, labels)

    contenders = [
        Contender("equal weights", step(False)),
        Contender("weighed by rows", step(True)),
    ]
    for contender in contenders:
        contender.run()
    title = f"step, {name}, K = {towers}"
    return race(title, contenders, peer="equal weights", rounds=rounds)


def run_first(name: str, towers: int, rounds: int) -> Any:
    """Races the first epoch of a network, above a later one."""
    devices = racing.use_devices(towers)
    x, y = networks.data(name, networks.ROWS * towers * networks.STEPS)
    make = partial(networks.seeded, networks.NETWORKS[name])

    def fitting(made: Any) -> Callable[[], Any]:
        made.compile(keras.optimizers.Adam(1e-3), "mse")
        options = {"batch_size": networks.ROWS * towers, "shuffle": False}
        return lambda: made.fit(x, y, verbose=0, **options)

    def mirrored() -> Callable[[], Any]:
        with tf.distribute.MirroredStrategy(devices).scope():
            return fitting(make())

    makers = {
        PEER: mirrored,
        "one device": lambda: fitting(make()),
        "once": lambda: fitting(TowerModel(make, devices)),
    }
    title = f"first epoch, {name}, K = {towers}"
    return networks.race_first(title, makers, PEER, rounds)


def _overheads(timings: list[Timing]) -> tuple[float, float]:
    """Returns the ms per step that fit adds: over towers, and on one device."""
    median = {timing.name: timing.median_s for timing in timings}
    return tuple(
        (median[fit] - median[f"bare steps, {fit}"]) * 1e3 / STEPS
        for fit in ("replicated", "one device")
    )


def main(options: Any, report: Report) -> None:
    """Races first and later epochs of Keras's fit, and steps with weights."""
    for name in options.networks:
        for towers in options.first_towers:
            raced = in_own_process(run_first, name, towers, options.rounds)
            targets = {
                ("once", PEER): 0.8 if towers < 8 else 0.65,
            }
            if towers == 8:
                targets["once", "one device"] = 2.6
            networks.report_first(report, raced, PEER, targets)
    for work in options.works:
        for towers in options.towers:
            timings = report.race(PEER, run_cell, work, towers, options.rounds)
            title = timings[0].work
            for ours in ("replicated", "sharded"):
                report.compare(timings, ours, PEER, AT_MOST)
            ten = "replicated, 10 steps per execution"
            report.compare(timings, ten, "replicated", 1.0)
            added, keras_adds = _overheads(timings)
            report.target(f"{title}: fit adds, ms per step", added, keras_adds)
            equal, rounds = "equal weights", options.rounds * 5
            weights = report.race(equal, run_weights, work, towers, rounds)
            report.compare(weights, "weighed by rows", equal, 1.02)

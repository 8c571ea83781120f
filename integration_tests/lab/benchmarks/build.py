"""Tracing a step and running it for the first time: our functions and MirroredStrategy.

A small model, with every kind of variables; and Keras networks, each traced once or for
each tower.

Each round creates new objects, so that nothing is cached between rounds; the creation
of variables is not timed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import networks
import racing
import step
import step_models
import tensorflow as tf
import training
from racing import Report, Timing, in_own_process, race_by

import tw_core
from tw_doctor._machine.race import seconds_of

OPTIONS = {
    "rounds": 9,
    "towers": [2, 4, 8],
    "networks": ["dense", "convolutional", "attention"],
}

PEER = "MirroredStrategy"
# Of the time of towers that do not reduce, which trace and differentiate as much.
TARGETS = {"replicated": 1.25, "sharded": 1.25, "flat": 1.0}


def run_cell(towers: int, rounds: int) -> list[Timing]:
    """Races first steps at one number of towers."""
    racing.use_devices(towers)
    work = step.WORKS["small"]()
    makers = {
        PEER: lambda: step.mirrored(work, towers, with_keras=False),
        **{
            kind: partial(step.function_step, work, towers, kind, with_keras=False)
            for kind in (*TARGETS, "parameter server", training.BOUND)
        },
    }
    for name in (name for name in makers if name != training.BOUND):
        step.checked(work, name, makers[name](), "")
    timers = {name: partial(first_step, make) for name, make in makers.items()}
    title = f"trace and first step, {work.name}, K = {towers}"
    options = {"bounds": [training.BOUND], "config": "tf.function, first call"}
    return race_by(title, timers, peer=PEER, rounds=rounds, **options)


def first_step(make: Callable[[], step.Built]) -> float:
    """Makes a step anew, and returns the seconds of its first call alone."""
    run, _ = make()
    return seconds_of(run)


def run_network(name: str, towers: int, rounds: int) -> Any:
    """Races first steps of a network at one number of towers."""
    devices = racing.use_devices(towers)
    x, y = networks.data(name, networks.ROWS * towers)
    make = partial(networks.seeded, networks.NETWORKS[name])

    def ours(trace: str) -> Any:
        step_, _ = training.function_step(
            devices,
            make,
            training.squared_error,
            step_models.new_optimizer,
            map_towers=partial(tw_core.map_towers, trace=trace),
        )
        return partial(step_, *training.shards_of(devices, x, y))

    def mirrored() -> Any:
        strategy = tf.distribute.MirroredStrategy(devices)
        step_, _ = training.mirrored_step(
            strategy, make, training.squared_error, step_models.new_optimizer
        )
        return partial(step_, *training.mirrored_shards(strategy, x, y))

    makers = {
        PEER: mirrored,
        "once": partial(ours, "once"),
        "each": partial(ours, "each"),
    }
    title = f"first step, {name}, K = {towers}"
    return networks.race_first(title, makers, PEER, rounds)


def main(options: Any, report: Report) -> None:
    """Races tracing and the first step of a tf.function."""
    at_most = {2: 0.8, 4: 0.5, 8: 0.35}
    for name in options.networks:
        for towers in options.towers:
            raced = in_own_process(run_network, name, towers, options.rounds)
            targets = {("once", PEER): at_most.get(towers, 0.35)}
            networks.report_first(report, raced, PEER, targets)
    for towers in options.towers:
        timings = report.race(PEER, run_cell, towers, options.rounds)
        for ours, at_most in TARGETS.items():
            report.compare(timings, ours, training.BOUND, at_most)

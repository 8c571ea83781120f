"""Tracing a step and running it for the first time: our functions and MirroredStrategy.

Each round makes new objects, so that nothing is cached between rounds; making
the variables is not timed.
"""

import argparse
import time
from functools import partial
from typing import Any

import step
from harness import Contender, Report, Timing, in_own_process, race, ratio

import tw_core

PEER = "MirroredStrategy"
TARGETS = {"replicated": 0.4, "sharded": 0.5, "flat": 0.35}


class FirstStep:
    """Makes a step anew, then times its first call alone."""

    def __init__(self, make: Any):
        self._make = make
        self.seconds: list[float] = []

    def __call__(self) -> None:
        run, _ = self._make()
        start = time.perf_counter()
        run()
        self.seconds.append(time.perf_counter() - start)


def run_cell(towers: int, rounds: int) -> list[Timing]:
    """Races first steps at one number of towers."""
    tw_core.use_logical_cpus(towers)
    work = step.WORKS["small"]()
    makers = {
        PEER: lambda: step.mirrored(work, towers, with_keras=False),
        **{
            kind: partial(step.function_step, work, towers, kind, with_keras=False)
            for kind in ("replicated", "sharded", "flat", "parameter server")
        },
    }
    for name, make in makers.items():
        step.checked(work, name, make(), "")
    firsts = {name: FirstStep(make) for name, make in makers.items()}
    contenders = [
        Contender(name, first, config="tf.function, first call")
        for name, first in firsts.items()
    ]
    title = f"trace and first step, {work.name}, K = {towers}"
    return race(title, contenders, peer=PEER, rounds=rounds, timer=_timer(firsts))


def _timer(firsts: dict[str, FirstStep]) -> Any:
    def timed(contender: Contender) -> float:
        first = firsts[contender.name]
        first()
        return first.seconds[-1]

    return timed


def main(arguments: list[str]) -> None:
    """Races tracing and the first step of a tf.function."""
    parser = argparse.ArgumentParser(prog="build", description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns (%(default)s)")
    parser.add_argument("--towers", type=int, nargs="*", default=[2, 4, 8])
    options = parser.parse_args(arguments)
    report = Report("build")
    for towers in options.towers:
        timings = in_own_process(run_cell, towers, options.rounds)
        report.add(timings, PEER)
        for ours, at_most in TARGETS.items():
            title = f"{timings[0].work}: {ours} / {PEER}"
            report.target(title, ratio(timings, ours), at_most)
    report.write()

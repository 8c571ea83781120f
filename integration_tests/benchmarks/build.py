"""Tracing a step and running it for the first time: our functions and MirroredStrategy.

Each round makes new objects, so that nothing is cached between rounds; making
the variables is not timed.
"""

import time
from functools import partial
from typing import Any

import step
from harness import Contender, Report, Timing, race

import tw_core

OPTIONS = {"rounds": 9, "towers": [2, 4, 8]}

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


def main(options: Any, report: Report) -> None:
    """Races tracing and the first step of a tf.function."""
    for towers in options.towers:
        timings = report.race(PEER, run_cell, towers, options.rounds)
        for ours, at_most in TARGETS.items():
            report.compare(timings, ours, PEER, at_most)

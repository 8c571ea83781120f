"""Synchronous replicas over gRPC: one parameter server and two workers as processes.

Every contender has a graph and a session of its own in both workers. The parent
has both start a block of steps at the same time, takes the slower one's time, and
has the contenders take turns. Before anything is timed, all synchronous ones must
have the parameters that gradient descent on the mean gradient has.
"""

import argparse
import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from harness import Contender, Report, paired_ratio, race
from syncrep_strategy import mirror
from syncrep_worker import WAIT_S, serve, train
from syncrep_works import CHECKED_STEPS, WORKS, Work, checked_value

from tw_syncrep._ports import find_free_ports

BLOCK_S = 0.25


def main(arguments: Sequence[str]) -> None:
    """Runs the works and writes ``out/bench/syncrep.json``."""
    parser = argparse.ArgumentParser(prog="syncrep")
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args(arguments)
    report = Report("syncrep")
    for work in (WORKS[name] for name in options.works):
        with processes(work) as crew:
            crew.check()
            contenders = [Contender(name, lambda: None) for name in work.contenders]
            timings = race(
                work.name,
                contenders,
                peer=work.peer,
                rounds=options.rounds,
                timer=lambda contender: crew.time(contender.name),
            )
        report.add(timings, work.peer)
        for name, speed in work.targets:
            # Time for time: at most 1 / (times as fast).
            measured = paired_ratio(timings, name, work.peer)
            report.target(f"{work.name}: {name}", measured, round(1 / speed, 4))
    report.write()


class Crew:
    """The parent's ends of the pipes to the workers of one work."""

    def __init__(self, work: Work, pipes: dict[str, list[Any]]) -> None:
        self.work = work
        self._pipes = pipes
        self._steps: dict[str, int] = {}

    def check(self) -> None:
        for name in self.work.contenders:
            self._block(name, CHECKED_STEPS)
            seen = self._ask(name, ("read", name), who=[0])[0]
            if name != "asynchronous":
                want = checked_value(self.work, name)
                np.testing.assert_allclose(seen, want, rtol=1e-2, err_msg=name)
            seconds = self._block(name, 5) / 5
            self._steps[name] = min(max(3, int(BLOCK_S / seconds)), 300)

    def time(self, name: str) -> float:
        """Seconds for one global step."""
        steps = self._steps[name]
        return self._block(name, steps) / steps

    def _block(self, name: str, steps: int) -> float:
        return max(self._ask(name, ("run", name, steps)))

    def _ask(self, name: str, message: Any, who: Sequence[int] = (0, 1)) -> list[Any]:
        pipes = self._pipes["strategy" if name == "multi-worker" else "session"]
        for worker in who:
            pipes[worker].send(message)
        return [_hear(pipes[worker]) for worker in who]


@contextlib.contextmanager
def processes(work: Work) -> Iterator[Crew]:
    """Starts the tasks of a work, and ends them."""
    context = multiprocessing.get_context("spawn")
    ports = find_free_ports(5)
    running: list[Any] = []

    def start(program: Any, cluster: dict[str, list[str]], job: str, index: int) -> Any:
        ours, theirs = context.Pipe()
        arguments = (theirs, cluster, job, index, work)
        process = context.Process(target=program, args=arguments, daemon=True)
        process.start()
        running.append(process)
        return ours

    cluster = {"ps": [ports[0]], "worker": ports[1:3]}
    try:
        _hear(start(serve, cluster, "ps", 0))
        pipes = {"session": [start(train, cluster, "worker", i) for i in range(2)]}
        for name in work.contenders:
            if name != "multi-worker":  # the chief's session first
                for pipe in pipes["session"]:
                    pipe.send(("make", name))
                    _hear(pipe)
        if "multi-worker" in work.contenders:
            own = {"worker": ports[3:]}
            pipes["strategy"] = [start(mirror, own, "worker", i) for i in range(2)]
            for pipe in pipes["strategy"]:
                _hear(pipe)
        yield Crew(work, pipes)
    finally:
        for process in running:
            process.kill()
            process.join()


def _hear(pipe: Any) -> Any:
    if not pipe.poll(WAIT_S):
        raise TimeoutError(f"a task said nothing for {WAIT_S} s")
    return pipe.recv()

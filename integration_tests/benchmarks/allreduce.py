"""All-reduce between processes: MultiWorkerMirroredStrategy and ours, in turns.

Every rank is a process that holds all contenders of TensorFlow's collectives. The
parent has all ranks start a block of steps at the same time, takes the slowest one's
time, and has the contenders take turns. Before anything is timed, all must have the
parameters that momentum on the mean gradient has.
"""

import argparse
import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from allreduce_rank import serve_rank
from allreduce_works import (
    CHECKED_STEPS,
    DDP,
    PEER,
    SERVER,
    WORKS,
    Work,
    parameter_after,
)
from harness import Contender, Report, paired_ratio, race

from tw_syncrep.cluster._network_exposure import find_free_ports

BLOCK_S = 0.25
WAIT_S = 120.0


def main(arguments: Sequence[str]) -> None:
    """Runs the works and writes ``out/bench/allreduce.json``."""
    parser = argparse.ArgumentParser(prog="allreduce")
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    report = Report("allreduce")
    for work in (WORKS[name] for name in options.works):
        with ranks(work, options.workers) as crew:
            crew.check()
            timings = race(
                work.name,
                [Contender(name, lambda: None) for name in crew.names],
                peer=PEER,
                rounds=options.rounds,
                timer=lambda contender: crew.time(contender.name),
            )
        report.add(timings, PEER)
        for name, peer, most in work.targets:
            if {name, peer} <= set(crew.names):
                measured = paired_ratio(timings, name, peer)
                report.target(f"{work.name}: {name} / {peer}", measured, most)
    report.write()


class Crew:
    """The parent's ends of the pipes to the ranks of one work."""

    def __init__(self, work: Work, pipes: list[Any]) -> None:
        self.work = work
        self.names = [name for name in work.contenders if name not in (SERVER, DDP)]
        self._pipes = pipes
        self._steps: dict[str, int] = {}

    def check(self) -> None:
        """Makes all contenders, and compares what they come to."""
        for name in self.names:
            self._ask(("make", name))
            self._block(name, CHECKED_STEPS)
            want = parameter_after(CHECKED_STEPS, len(self._pipes))
            for seen in self._ask(("read", name)):
                np.testing.assert_allclose(seen, want, rtol=1e-3, err_msg=name)
            seconds = self._block(name, 5) / 5
            self._steps[name] = min(max(3, int(BLOCK_S / seconds)), 300)

    def time(self, name: str) -> float:
        """Seconds for one step."""
        steps = self._steps[name]
        return self._block(name, steps) / steps

    def _block(self, name: str, steps: int) -> float:
        return max(self._ask(("run", name, steps)))

    def _ask(self, message: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(message)
        return [_hear(pipe) for pipe in self._pipes]


@contextlib.contextmanager
def ranks(work: Work, size: int) -> Iterator[Crew]:
    """Starts the ranks of a work, and ends them."""
    context = multiprocessing.get_context("spawn")
    ports = find_free_ports(size)
    running, pipes = [], []
    try:
        for rank in range(size):
            pipe, theirs = context.Pipe()
            arguments = (theirs, ports, rank, work)
            process = context.Process(target=serve_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            running.append(process)
            pipes.append(pipe)
        yield Crew(work, pipes)
    finally:
        for process in running:
            process.kill()
            process.join()


def _hear(pipe: Any) -> Any:
    if not pipe.poll(WAIT_S):
        raise TimeoutError(f"a rank said nothing for {WAIT_S} s")
    return pipe.recv()

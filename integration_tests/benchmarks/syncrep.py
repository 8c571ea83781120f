"""Synchronous replicas over gRPC: one parameter server and two workers as processes.

There are two such clusters, one with TensorFlow's servers and one with the package's.
Every contender has a graph and a session of its own in both workers of one. The parent
has both start a block of steps at the same time, takes the slower one's time, and
has the contenders take turns. Before anything is timed, all synchronous ones must
have the parameters that gradient descent on the mean gradient has.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from harness import Contender, Report, hear, paired_ratio, race, tasks
from syncrep_strategy import mirror
from syncrep_worker import WAIT_S, has_our_servers, serve, train
from syncrep_works import (
    ASYNCHRONOUS,
    CHECKED_STEPS,
    MULTI_WORKER,
    SAME_SERVERS,
    WORKS,
    Work,
    checked_value,
)

from tw_syncrep.cluster._network_exposure import find_free_ports

OPTIONS = {"works": "syncrep_works.WORKS", "rounds": 21}

BLOCK_S = 0.25
_hear = partial(hear, wait_s=WAIT_S)


def main(options: Any, report: Report) -> None:
    """Runs the works and writes ``out/bench/syncrep.json``."""
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
            measured = paired_ratio(timings, name, peer_of(work, name))
            report.target(f"{work.name}: {name}", measured, round(1 / speed, 4))


class Crew:
    """The parent's ends of the pipes to the workers of one work."""

    def __init__(self, work: Work, pipes: dict[str, list[Any]]) -> None:
        self.work = work
        self._pipes = pipes
        self._steps: dict[str, int] = {}

    def check(self) -> None:
        for name in self.work.contenders:
            self.block(name, CHECKED_STEPS)
            seen = self._ask(name, ("read", name), who=[0])[0]
            if name != ASYNCHRONOUS:
                want = checked_value(self.work, name)
                np.testing.assert_allclose(seen, want, rtol=1e-2, err_msg=name)
            seconds = self.block(name, 5) / 5
            self._steps[name] = min(max(3, int(BLOCK_S / seconds)), 300)

    def time(self, name: str) -> float:
        """Seconds for one global step."""
        steps = self._steps[name]
        return self.block(name, steps) / steps

    def block(self, name: str, steps: int) -> float:
        """Runs steps on both workers; the slower one's seconds."""
        return max(self._ask(name, ("run", name, steps)))

    def _ask(self, name: str, message: Any, who: Sequence[int] = (0, 1)) -> list[Any]:
        pipes = self._pipes[_place(name)]
        for worker in who:
            pipes[worker].send(message)
        return [_hear(pipes[worker]) for worker in who]


@contextlib.contextmanager
def processes(work: Work) -> Iterator[Crew]:
    """Starts the tasks of a work, and ends them."""
    with tasks() as start:

        def start_cluster(names: Sequence[str], *, ours: bool) -> list[Any]:
            ports = find_free_ports(3)
            cluster = {"ps": ports[:1], "worker": ports[1:]}
            _hear(start(serve, cluster, "ps", 0, work, ours))
            workers = [start(train, cluster, "worker", i, work, ours) for i in range(2)]
            for name in names:
                for pipe in workers:  # the chief's session first
                    pipe.send(("make", name))
                    _hear(pipe)
            return workers

        pipes = {}
        for place in dict.fromkeys(map(_place, work.contenders)):
            names = [name for name in work.contenders if _place(name) == place]
            if place == "strategy":
                own = {"worker": find_free_ports(2)}
                pipes[place] = [
                    start(mirror, own, "worker", i, work, True) for i in range(2)
                ]
                for pipe in pipes[place]:
                    _hear(pipe)
            else:
                pipes[place] = start_cluster(names, ours=place == "ours")
        yield Crew(work, pipes)


def peer_of(work: Work, name: str) -> str:
    """Names whom a target is measured against: the peer in servers of the same kind."""
    alike = has_our_servers(name) and SAME_SERVERS in work.contenders
    return SAME_SERVERS if alike else work.peer


def _place(name: str) -> str:
    """Names the cluster that a contender runs in."""
    if name == MULTI_WORKER:
        return "strategy"
    return "ours" if has_our_servers(name) else "tensorflow's"

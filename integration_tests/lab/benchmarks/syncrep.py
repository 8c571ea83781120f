"""Synchronous replicas over gRPC: one parameter server and two workers as processes.

There are two such clusters, one with TensorFlow's servers and one with the package's.
Every contender has its own graph and session in both workers of one cluster. The parent
starts a block of steps on both at the same time, measures the slower one, and runs the
contenders in turn. Before anything is timed, all synchronous ones must have the
parameters that gradient descent on the mean gradient has.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from harness.ports import find_free_ports
from racing import (
    WAIT_S,
    Block,
    Report,
    ask,
    blocks_in,
    race_blocks,
    tasks,
)
from syncrep_worker import (
    ASYNCHRONOUS,
    CHECKED_STEPS,
    MULTI_WORKER,
    SAME_SERVERS,
    WORKS,
    Work,
    checked_value,
    has_our_servers,
    mirror,
    serve,
    train,
)

OPTIONS = {"works": "syncrep_worker.WORKS", "rounds": 21}


def main(options: Any, report: Report) -> None:
    """Runs the works and writes ``out/bench/syncrep.json``."""
    for work in (WORKS[name] for name in options.works):
        with processes(work) as blocks:
            timings = race_blocks(
                work.name, blocks, peer=work.peer, rounds=options.rounds
            )
        report.add(timings, work.peer)
        for name, speed in work.targets.items():
            # Time for time: at most 1 / (times as fast).
            report.compare(timings, name, peer_of(work, name), round(1 / speed, 4))


@contextlib.contextmanager
def processes(work: Work) -> Iterator[dict[str, Block]]:
    """Starts the tasks of a work; gives what runs a block of each checked contender."""
    with tasks() as start:

        def start_cluster(place: str) -> list[Any]:
            if place == "strategy":
                own = {"worker": find_free_ports(2)}
                return [start(mirror, own, index, work) for index in range(2)]
            ports = find_free_ports(3)
            cluster = {"ps": ports[:1], "worker": ports[1:]}
            ours = place == "ours"
            start(serve, cluster, "ps", 0, ours).hear(WAIT_S)
            return [start(train, cluster, index, work, ours) for index in range(2)]

        places = {name: _place(name) for name in work.contenders}
        pipes = {
            place: start_cluster(place) for place in dict.fromkeys(places.values())
        }
        blocks: dict[str, Block] = {}
        for name, place in places.items():
            workers = pipes[place]
            for pipe in workers:  # the chief's session first
                ask([pipe], "make", name)
            blocks |= blocks_in(workers, [name])
        for name, block in blocks.items():
            block(CHECKED_STEPS)
            [seen] = ask(pipes[places[name]][:1], "read", name)
            if name != ASYNCHRONOUS:
                want = checked_value(work, name)
                np.testing.assert_allclose(seen, want, rtol=1e-2, err_msg=name)
        yield blocks


def peer_of(work: Work, name: str) -> str:
    """Names whom a target is measured against: the peer in servers of the same kind."""
    alike = has_our_servers(name) and SAME_SERVERS in work.contenders
    return SAME_SERVERS if alike else work.peer


def _place(name: str) -> str:
    """Names the cluster that a contender runs in."""
    if name == MULTI_WORKER:
        return "strategy"
    return "ours" if has_our_servers(name) else "tensorflow's"

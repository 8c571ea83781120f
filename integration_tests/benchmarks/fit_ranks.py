"""Keras's ``fit`` over two processes: ours, Horovod's names, and TensorFlow's strategy.

Every rank is a process that holds all contenders; the parent has all ranks run an epoch
at the same time, takes the slowest one's time, and has the contenders take turns. One
more process trains two towers on all rows. Before anything is timed all must have the
same losses. Keras's ``fit`` does not run under MultiWorkerMirroredStrategy, which has a
loop of its own here.
"""

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
from fit_ranks_rank import (
    EXCHANGES,
    HOROVOD,
    ONE_PROCESS,
    OURS,
    PEER,
    serve_one,
    serve_rank,
)
from harness.ports import find_free_ports
from racing import Block, Report, ask, race_blocks, tasks

OPTIONS = {"works": "fit_ranks_rank.WORKS", "rounds": 21}

RANKS = 2
OF_PEER, OF_TOWERS_AND_SUMS = 0.6, 1.15


def main(options: Any, report: Report) -> None:
    """Races epochs over processes."""
    for work in options.works:
        with started(work) as blocks:
            title = f"epoch over two processes, {work}"
            timings = race_blocks(title, blocks, peer=PEER, rounds=options.rounds)
        report.add(timings, PEER)
        report.compare(timings, OURS, PEER, OF_PEER)
        times = {timing.name: timing.times_s for timing in timings}
        rounds = zip(*(times[n] for n in (OURS, ONE_PROCESS, EXCHANGES)), strict=True)
        measured = statistics.median(own / (one + sums) for own, one, sums in rounds)
        what = f"{title}: {OURS} / ({ONE_PROCESS} + {EXCHANGES})"
        report.target(what, measured, OF_TOWERS_AND_SUMS)


@contextlib.contextmanager
def started(work: str) -> Iterator[dict[str, Block]]:
    """Starts two ranks, and one process with two towers."""
    ports = find_free_ports(RANKS + 1)
    with tasks() as start:
        ranks = [start(serve_rank, ports, rank, work) for rank in range(RANKS)]
        alone = [start(serve_one, work, RANKS)]
        names = (PEER, OURS, HOROVOD, EXCHANGES)
        pipes = dict.fromkeys(names, ranks) | {ONE_PROCESS: alone}
        for name, own in pipes.items():
            ask(own, "make", name)
            ask(own, "run", name, 1)
        want = ask(alone, "read", ONE_PROCESS)[0]
        for name in (PEER, OURS, HOROVOD):
            read = ask(ranks, "read", name)
            np.testing.assert_allclose(read, want, rtol=1e-4, err_msg=name)
        yield {
            name: lambda n, own=own, name=name: max(ask(own, "run", name, n))
            for name, own in pipes.items()
        }

"""All-reduce between processes: MultiWorkerMirroredStrategy and ours, in turn.

Every rank is a process with all contenders of TensorFlow's collectives. The parent
starts a block of steps on all ranks at the same time, measures the slowest rank, and
runs the contenders in turn. Before anything is timed, all must have the parameters of
momentum on the mean gradient.

The contenders over MPI take turns with them in separate ranks, as a process is in one
group. Two more run in separate processes: PyTorch's DistributedDataParallel over gloo,
if ``--torch`` names a Python that has it, and this package's parameter server.
"""

import contextlib
import json
import multiprocessing
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import syncrep
from allreduce_rank import (
    AT_MOST,
    CHECKED_STEPS,
    DDP,
    MOMENTUM,
    MPI,
    MPI_SESSION,
    PEER,
    RATE,
    SERVER,
    WORKS,
    Work,
    parameter_after,
    serve_mpi_rank,
    serve_rank,
)
from harness.ports import find_free_ports
from harness.ranks import Ranks
from racing import Block, Report, blocks_in, make, race_blocks, tasks
from syncrep_worker import PULLED
from syncrep_worker import Work as ServerWork

from tw_launch._launcher.pmi import PmiTable

OPTIONS = {"works": "allreduce_rank.WORKS", "rounds": 21, "workers": 2, "torch": None}

TORCH = Path(__file__).with_name("allreduce_torch.py")


def main(options: Any, report: Report) -> None:
    """Runs the works and writes ``out/bench/allreduce.json``."""
    for work in (WORKS[name] for name in options.works):
        rounds, peer = options.rounds, PEER
        with contextlib.ExitStack() as stack:
            if work.program:
                blocks = stack.enter_context(alone(work, options.workers))
                rounds = min(rounds, 5) if work.mbit else rounds
                peer = work.contenders[0]
            else:
                blocks = stack.enter_context(ours_and_peers(work, options.workers))
            if MPI in work.contenders:
                blocks |= stack.enter_context(ours_over_mpi(work, options.workers))
            if DDP in work.contenders and options.torch:
                started = ddp(options.torch, work, options.workers)
                blocks[DDP] = stack.enter_context(started)
            if SERVER in work.contenders and options.workers == 2:
                blocks[SERVER] = stack.enter_context(server(work))
            timings = race_blocks(work.name, blocks, peer=peer, rounds=rounds)
        report.add(timings, peer)
        for pair, most in {**AT_MOST, **work.targets}.items():
            if set(pair) <= set(blocks):
                report.compare(timings, *pair, most)


@contextlib.contextmanager
def ours_and_peers(work: Work, size: int) -> Iterator[dict[str, Block]]:
    """Starts ranks that hold all contenders of TensorFlow's collectives."""
    ports = find_free_ports(size)
    with tasks() as start:
        pipes = [start(serve_rank, ports, rank, work) for rank in range(size)]
        others = (SERVER, DDP, MPI, MPI_SESSION)
        yield _make(pipes, [name for name in work.contenders if name not in others])


@contextlib.contextmanager
def ours_over_mpi(work: Work, size: int) -> Iterator[dict[str, Block]]:
    """Starts ranks that hold our contenders over MPI."""
    with contextlib.closing(PmiTable(size)) as world, tasks() as start:
        pipes = [
            start(serve_mpi_rank, world.variables(rank), rank, work)
            for rank in range(size)
        ]
        ours = (MPI, MPI_SESSION)
        yield _make(pipes, [name for name in work.contenders if name in ours])


@contextlib.contextmanager
def alone(work: Work, size: int) -> Iterator[dict[str, Block]]:
    """Starts ranks that hold contenders of ours, each rank a host if a link is slow."""
    tied: dict[str, Any] = {"machines": (0, 1), "linked": True} if work.mbit else {}
    context = multiprocessing.get_context("spawn")
    with Ranks(context, 2 if work.mbit else size, **tied) as ranks:
        ranks.joined()
        if work.mbit:
            limit = f"rate {work.mbit}mbit burst 64kb latency 400ms"
            ranks.call("local_steps:limit", limit)
        for name in work.contenders:
            seen = ranks.call(f"{work.program}:make", name, work.shapes)
            if len(set(seen)) > 1 or not np.isfinite(seen).all():
                raise RuntimeError(f"{name}: ranks have different variables: {seen}")

        def block(name: str, steps: int) -> float:
            return max(ranks.call(f"{work.program}:run", name, steps))

        yield {name: partial(block, name) for name in work.contenders}


def _make(pipes: Sequence[Any], names: Sequence[str]) -> dict[str, Block]:
    """Makes contenders on all ranks, and checks what they compute."""
    for name in names:
        _check(name, make(pipes, name, CHECKED_STEPS))
    return blocks_in(pipes, names)


@contextlib.contextmanager
def ddp(python: str, work: Work, size: int) -> Iterator[Block]:
    """Starts ranks of PyTorch."""
    [port] = find_free_ports(1)
    shapes = json.dumps(work.shapes)
    common = [str(size), str(port), shapes, str(RATE), str(MOMENTUM)]
    running = [
        subprocess.Popen(
            [python, str(TORCH), str(rank), *common],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]

    def block(steps: int) -> float:
        for process in running:
            print(steps, file=process.stdin, flush=True)
        return max([float(process.stdout.readline()) for process in running])

    try:
        block(CHECKED_STEPS)
        for process in running:
            print(0, file=process.stdin, flush=True)
        _check(DDP, [float(process.stdout.readline()) for process in running])
        yield block
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextlib.contextmanager
def server(work: Work) -> Iterator[Block]:
    """Starts the same with a parameter server and two replicas."""
    [size] = set(work.shapes)
    model = ServerWork(work.name, len(work.shapes), *size, {}, (PULLED,))
    with syncrep.processes(model) as blocks:
        yield blocks[PULLED]


def _check(name: str, seen: Sequence[float]) -> None:
    want = parameter_after(CHECKED_STEPS, len(seen))
    np.testing.assert_allclose(seen, want, rtol=1e-3, err_msg=name)

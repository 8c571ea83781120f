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
import os
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
    DDP_ALONE,
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

from tw_launch._addresses import split_address
from tw_launch._launcher.pmi import PmiTable

OPTIONS = {"works": "allreduce_rank.WORKS", "rounds": 21, "workers": 2, "torch": None}

TORCH = Path(__file__).with_name("allreduce_torch.py")


def main(options: Any, report: Report) -> None:
    """Runs the works and writes ``out/bench/allreduce.json``."""
    for work in (WORKS[name] for name in options.works):
        rounds, peer = options.rounds, PEER
        with contextlib.ExitStack() as stack:
            if work.program:
                blocks = stack.enter_context(
                    alone(work, options.workers, options.torch)
                )
                rounds = min(rounds, 5) if work.mbit else rounds
                peer = work.contenders[0]
            else:
                blocks = stack.enter_context(ours_and_peers(work, options.workers))
            if MPI in work.contenders:
                blocks |= stack.enter_context(ours_over_mpi(work, options.workers))
            if DDP in work.contenders and options.torch and not work.program:
                blocks |= stack.enter_context(ddp(options.torch, work, options.workers))
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
def alone(work: Work, size: int, torch: str) -> Iterator[dict[str, Block]]:
    """Starts ranks that hold contenders of ours, each rank a host if a link is slow.

    There PyTorch's have the same links, and the processor of our rank.
    """
    tied: dict[str, Any] = {"machines": (0, 1), "linked": True} if work.mbit else {}
    context = multiprocessing.get_context("spawn")
    with Ranks(context, 2 if work.mbit else size, **tied) as ranks:
        ranks.joined()
        if work.mbit:
            limit = f"rate {work.mbit}mbit burst 64kb latency 400ms"
            ranks.call("local_steps:limit", limit)
        ours = [name for name in work.contenders if name not in (DDP, DDP_ALONE)]
        for name in ours:
            seen = ranks.call(f"{work.program}:make", name, work)
            if len(set(seen)) > 1 or not np.isfinite(seen).all():
                raise RuntimeError(f"{name}: ranks have different variables: {seen}")

        def block(name: str, steps: int) -> float:
            return max(ranks.call(f"{work.program}:run", name, steps))

        blocks = {name: partial(block, name) for name in ours}
        has_theirs = torch and DDP in work.contenders
        with (
            ddp(torch, work, 2, ranks)
            if has_theirs
            else contextlib.nullcontext({}) as own
        ):
            yield blocks | own


def _make(pipes: Sequence[Any], names: Sequence[str]) -> dict[str, Block]:
    """Makes contenders on all ranks, and checks what they compute."""
    for name in names:
        _check(name, make(pipes, name, CHECKED_STEPS))
    return blocks_in(pipes, names)


@contextlib.contextmanager
def ddp(
    python: str, work: Work, size: int, ranks: Ranks | None = None
) -> Iterator[dict[str, Block]]:
    """Starts ranks of PyTorch, on the hosts of other ranks if these are given."""
    [port] = find_free_ports(1)
    host = "localhost" if ranks is None else split_address(ranks.address)[0]
    model = json.dumps([work.network, work.rows] if work.network else work.shapes)
    momentum = 0.0 if work.network else MOMENTUM  # Ours have none there.
    common = [str(size), f"{host}:{port}", model, str(RATE), str(momentum)]
    running = [
        subprocess.Popen(
            [*_place(ranks, rank), python, str(TORCH), str(rank), *common],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Of a host's one interface; by default it is that of the machine's name.
            env=os.environ | ({"GLOO_SOCKET_IFNAME": "task"} if ranks else {}),
        )
        for rank in range(size)
    ]

    def ask(what: str) -> list[float]:
        for process in running:
            print(what, file=process.stdin, flush=True)
        return [float(process.stdout.readline()) for process in running]

    try:
        ask(f"{CHECKED_STEPS} together")
        if not work.network:
            _check(DDP, ask("0 together"))
        kinds = {DDP: "together", DDP_ALONE: "alone"}
        yield {
            name: lambda steps, kind=kind: max(ask(f"{steps} {kind}"))
            for name, kind in kinds.items()
            if name in work.contenders
        }
    finally:
        for process in running:
            process.kill()
            process.wait()


def _place(ranks: Ranks | None, rank: int) -> list[str]:
    """Returns the words by which a command runs on a rank's host and processor."""
    if ranks is None:
        return []
    network = f"nsenter --net=/proc/{ranks.all[rank].process.pid}/ns/net"
    return f"{network} taskset -c {rank % (os.cpu_count() or 1)}".split()


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

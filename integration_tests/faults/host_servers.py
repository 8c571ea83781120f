"""Situations between hosts with parameter servers: what is cut, and what must hold.

All hosts of a situation are namespaces of this machine (``hosts``); the tasks on them
are those of ``host_worker.py``.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.processes import Program
from hosts import GRACE_S, Hosts, run_on_hosts


def servers_and_workers(
    hosts: Hosts,
    *options: str,
    servers: list[int],
    workers: list[int],
    wait_s: float,
) -> list[Program]:
    """Starts a run with parameter servers; returns the workers when they train."""
    words = task_words(*options, servers=servers, workers=workers, wait_s=wait_s)
    for index, host in enumerate(servers):
        hosts.python(host, "host_worker.py", "ps", index, *words)
    started = [
        hosts.python(host, "host_worker.py", "worker", index, *words)
        for index, host in enumerate(workers)
    ]
    for worker in started:
        worker.wait_for("step 20")
    return started


def task_words(
    *options: str, servers: list[int], workers: list[int], wait_s: float
) -> tuple[object, ...]:
    """Returns what every task of a cluster is told."""
    listed = [
        ",".join(f"node{host}:{base + n}" for n, host in enumerate(where))
        for base, where in ((5000, servers), (6000, workers))
    ]
    return (*listed, wait_s, *options)


def refuse_a_worker(hosts: Hosts, *options: str) -> None:
    """A worker's own port refuses; its servers answer: its step ends in time."""
    (worker,) = servers_and_workers(
        hosts, *options, servers=[0], workers=[1], wait_s=8.0
    )
    hosts.refuse(1, 6000)
    told = worker.wait_for("ENDED.*", within_s=8.0 + GRACE_S).group()
    assert "SyncTimeoutError" in told, told
    assert "do not reach this task, worker 0, at node1:6000" in told, told
    assert worker.finish(GRACE_S) >= 0


def part_servers(hosts: Hosts) -> None:
    """Servers answer the workers and not each other: all workers raise, and say so."""
    workers = servers_and_workers(hosts, servers=[0, 1], workers=[2, 2], wait_s=8.0)
    hosts.drop(0, 1)
    for worker in workers:
        told = worker.wait_for("ENDED.*", within_s=8.0 + GRACE_S).group()
        pair = "ps 0 (node0:5000) and ps 1 (node1:5001)"
        assert f"do not reach each other: {pair}" in told, told


def cut_off_elastic(hosts: Hosts) -> None:
    """A replica is cut off, evicted, and back by itself once its network is."""
    stays, goes = servers_and_workers(
        hosts, "elastic", servers=[0], workers=[1, 2], wait_s=5.0
    )
    hosts.drop(2, 0, 1)
    stays.wait_for("goes on without replica", within_s=5.0 + GRACE_S)
    time.sleep(9.0)
    hosts.heal()
    healed = last_step(stays)
    until = time.monotonic() + 60
    while last_step(goes) <= healed:
        assert time.monotonic() < until, goes.out[-300:]
        time.sleep(0.2)
    assert "ENDED" not in stays.out + goes.out


def replace_a_chief(hosts: Hosts) -> None:
    """A chief that was cut off finds its successor, and yields; the run goes on."""
    where = {"servers": [0], "workers": [1, 2], "wait_s": 100.0}
    older, other = servers_and_workers(hosts, **where)
    # The server must lose its connection to the old host: TCP alone gives a silent one
    # up after a quarter of an hour.
    hosts.refuse(1, 6000, sender=0)
    time.sleep(2.0)
    hosts.drop(1, 0, 2, 3)
    hosts.move_name(1, to=3)
    newer = hosts.python(3, "host_worker.py", "worker", 0, *task_words(**where))
    newer.wait_for("step ")
    hosts.heal()
    told = older.wait_for("ENDED.*", within_s=60).group()
    assert "ReplicaReplacedError" in told, told
    for program in (newer, other):
        program.wait_for(f"step {last_step(program) + 30}\n")
    assert "ENDED" not in newer.out + other.out


def start_a_chief_elsewhere(hosts: Hosts) -> None:
    """A chief that was lost is started at a new address: its error says why not."""
    where = {"servers": [0], "workers": [1], "wait_s": 20.0}
    (older,) = servers_and_workers(hosts, **where)
    older.kill()
    words = task_words(servers=[0], workers=[2], wait_s=20.0)
    newer = hosts.python(2, "host_worker.py", "worker", 0, *words)
    told = newer.wait_for("ENDED.*").group()
    assert "StartTimeoutError" in told, told
    assert "do not reach this task, worker 0, at node2:6000" in told, told


def last_step(worker: Program) -> int:
    """Returns the last step that a worker has printed."""
    return int(re.findall(r"^step (\d+)$", worker.out, re.MULTILINE)[-1])


SITUATIONS: dict[str, tuple[int, Callable[[Hosts], None]]] = {
    "a worker's port refuses": (2, refuse_a_worker),
    "an elastic worker's port refuses": (
        2,
        lambda hosts: refuse_a_worker(hosts, "elastic"),
    ),
    "servers are parted": (3, part_servers),
    "an elastic replica is cut off": (3, cut_off_elastic),
    "a chief finds its successor": (4, replace_a_chief),
    "a chief is started at a new address": (3, start_a_chief_elsewhere),
}
DRILLS = {f"hosts: {name}": taken for name, taken in SITUATIONS.items()}


def run_drill(context: Any, name: str, folder: Path) -> Any:
    """Runs one situation."""
    del context
    return run_on_hosts(*DRILLS[name], folder)

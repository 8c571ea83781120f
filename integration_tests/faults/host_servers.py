"""Situations between hosts with parameter servers: what is cut, and what must hold.

All hosts of a situation are namespaces of this machine (``hosts``); the tasks on them
are those of ``host_worker.py``.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosts import GRACE_S, Hosts, Program, address_of, run_on_hosts


def servers_and_workers(
    hosts: Hosts,
    *options: str,
    servers: list[int],
    workers: list[int],
    wait_s: float,
) -> list[Program]:
    """Starts a run with parameter servers; returns the workers when they train."""
    listed = [
        ",".join(f"{address_of(host)}:{base + n}" for n, host in enumerate(where))
        for base, where in ((5000, servers), (6000, workers))
    ]
    words = (*listed, wait_s, *options)
    for index, host in enumerate(servers):
        hosts.python(host, "host_worker.py", "ps", index, *words)
    started = [
        hosts.python(host, "host_worker.py", "worker", index, *words)
        for index, host in enumerate(workers)
    ]
    for worker in started:
        worker.wait_for("step 20")
    return started


def refuse_a_worker(hosts: Hosts, *options: str) -> None:
    """A worker's own port refuses; its servers answer: its step ends in time."""
    wait_s = 8.0
    (worker,) = servers_and_workers(
        hosts, *options, servers=[0], workers=[1], wait_s=wait_s
    )
    hosts.refuse(1, 6000)
    began = time.monotonic()
    worker.wait_for("ENDED", within_s=wait_s + GRACE_S)
    worker.wait(within_s=GRACE_S)
    assert time.monotonic() - began >= wait_s / 2


SITUATIONS: dict[str, tuple[int, Callable[[Hosts], None]]] = {
    "a worker's port refuses": (2, refuse_a_worker),
}
DRILLS = {f"hosts: {name}": taken for name, taken in SITUATIONS.items()}


def run_drill(context: Any, name: str, folder: Path) -> Any:
    """Runs one situation."""
    del context
    return run_on_hosts(*DRILLS[name], folder)

"""Situations between hosts, with ranks or servers: what is cut, what must hold.

All hosts of a situation are namespaces of this machine (``hosts``); what runs on them
is ``host_program.py``.
"""

import functools
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.processes import Program
from lab.faults.hosts import COMMAND_S, GRACE_S, START_S, Hosts, run_on_hosts


def last_step(program: Program) -> int:
    """Returns the latest step that a program has printed."""
    return max(
        (int(n) for n in re.findall(r"(?m)^step (\d+)$", program.out)), default=0
    )


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
        hosts.python(host, "ps", index, *words)
    started = [
        hosts.python(host, "worker", index, *words)
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
    assert "cannot reach this task, worker 0, at node1:6000" in told, told
    assert worker.finish(GRACE_S) >= 0


def part_servers(hosts: Hosts) -> None:
    """Servers answer the workers and not each other: all workers raise, and say so."""
    workers = servers_and_workers(hosts, servers=[0, 1], workers=[2, 2], wait_s=8.0)
    hosts.drop(0, 1)
    for worker in workers:
        told = worker.wait_for("ENDED.*", within_s=8.0 + GRACE_S).group()
        pair = "ps 0 (node0:5000) and ps 1 (node1:5001)"
        assert f"cannot reach each other: {pair}" in told, told


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
    newer = hosts.python(3, "worker", 0, *task_words(**where))
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
    newer = hosts.python(2, "worker", 0, *words)
    told = newer.wait_for("ENDED.*").group()
    assert "StartTimeoutError" in told, told
    assert "cannot reach this task, worker 0, at node2:6000" in told, told


def train_ranks(
    hosts: Hosts, size: int, timeout_s: float, stall_s: float
) -> list[Program]:
    """Starts ranks; returns them when they train."""
    ranks = start_ranks(hosts, size, timeout_s, stall_s)
    for rank in ranks:
        rank.wait_for("(?m)^step 20$")
    return ranks


def start_ranks(
    hosts: Hosts, size: int, timeout_s: float, stall_s: float
) -> list[Program]:
    """Starts ranks, which train soon."""
    options = size, timeout_s, stall_s
    return [hosts.python(r, "rank", r, *options) for r in range(size)]


def hear_ends(ranks: list[Program], within_s: float) -> list[str]:
    """Waits until all ranks have ended by an error of ours; returns the errors."""
    until = time.monotonic() + within_s
    found = []
    for rank in ranks:
        left_s = max(0.0, until - time.monotonic())
        match = rank.wait_for(r"ENDED after \S+ s: (.*)", within_s=left_s)
        found.append(match.group(1))
    for one in found:
        assert one.startswith("RankTimeoutError"), found
    return found


def bear_an_outage(hosts: Hosts, *, cut_s: float, timeout_s: float) -> None:
    """A host loses its network for less than ``timeout_s``: the run goes on."""
    ranks = train_ranks(hosts, 2, timeout_s, 60.0)
    hosts.drop(1, 0)
    time.sleep(cut_s)
    hosts.heal()
    before = last_step(ranks[0])
    # Where the kernel has no bound on the time between TCP's retries, up to as long.
    for rank in ranks:
        rank.wait_for(f"(?m)^step {before + 20}$", within_s=cut_s + GRACE_S)
        assert "took" in rank.out.partition("step 20\n")[2], "nothing was cut"


def name_a_cut_off_rank(hosts: Hosts) -> None:
    """A host loses its network for good: it says that it may be itself."""
    ranks = train_ranks(hosts, 3, 5.0, 60.0)
    hosts.drop(1, 0, 2)
    ends = hear_ends(ranks, 5.0 + GRACE_S)
    for rank in (0, 2):
        assert "[1]" in ends[rank], ends
        assert "has been silent for" in ends[rank], ends
    assert "[0]" in ends[1], ends
    assert "or this rank itself is cut off" in ends[1], ends


def name_a_pair(hosts: Hosts) -> None:
    """Two ranks that reach rank 0 do not reach each other: both are named."""
    stall_s = 12.0
    ranks = train_ranks(hosts, 3, 5.0, stall_s)
    hosts.drop(1, 2)
    _assert_pair(hear_ends(ranks, stall_s + GRACE_S), "timed out")
    for rank in ranks:
        warned = re.findall("reports a stall: (.*)", rank.out)
        assert warned, "no warning"
        assert all("rank 0 (" not in told for told in warned), warned


def name_a_refused_pair(hosts: Hosts) -> None:
    """A rank resets what another one sends: TensorFlow's error names neither."""
    hosts.refuse(1, sender=2)
    ranks = start_ranks(hosts, 3, 6.0, 20.0)
    _assert_pair(hear_ends(ranks, START_S), "refused")


def _assert_pair(ends: list[str], why: str) -> None:
    for told in ends:
        assert "[1, 2]" in told, ends
        assert "rank 0 (" not in told, ends
        assert "waits for rank 1: node1 does not answer node2 (" in told, ends
        assert why in told, ends


def warn_of_a_slow_pair(hosts: Hosts) -> None:
    """What rank 1 sends rank 2 is slow: warnings name these two, and nobody ends."""
    ranks = train_ranks(hosts, 3, 4.0, 600.0)
    hosts.slow_down(2, sender=1, bytes_per_s=20_000)
    for rank in ranks:
        told = rank.wait_for("reports a stall: (.*)", within_s=4.0 + 10.0).group(1)
        assert "rank 2 (" in told, told
        assert "receives" in told, told
        assert "rank 0 (" not in told, told
    hosts.heal()
    before = last_step(ranks[0])
    for rank in ranks:
        rank.wait_for(f"(?m)^step {before + 20}$", within_s=30.0)


def say_that_a_name_is_local(hosts: Hosts) -> None:
    """Host 0 is 127.0.1.1 to itself: rank 0 says so, and tw-launch ends at once."""
    hosts.name_locally(0)
    command = "-m tw_launch --nnodes 2 --coordinator node0:4001 -- true"
    launcher = hosts.run(0, sys.executable, *command.split())
    assert launcher.finish(COMMAND_S) == 2
    local = "node0 resolves to 127.0.1.1 here, where other machines cannot reach"
    assert f"--coordinator node0:4001: {local} node 0" in launcher.out
    rank = hosts.python(0, "rank", 0, 2, 5.0, 60.0)
    rank.wait_for(f"only ranks on this machine can join: {local} rank 0")


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
    **{
        f"ranks bear an outage of {cut_s:g} s of {timeout_s:g}": (
            2,
            functools.partial(bear_an_outage, cut_s=cut_s, timeout_s=timeout_s),
        )
        for cut_s, timeout_s in ((4.0, 6.0), (8.5, 10.0), (35.0, 40.0))
    },
    "a rank is cut off": (3, name_a_cut_off_rank),
    "two ranks do not reach each other": (3, name_a_pair),
    "a rank refuses another": (3, name_a_refused_pair),
    "two ranks have a slow connection": (3, warn_of_a_slow_pair),
    "a host's name is local to itself": (1, say_that_a_name_is_local),
}
DRILLS = {f"hosts: {name}": taken for name, taken in SITUATIONS.items()}


def run_drill(context: Any, name: str, folder: Path) -> Any:
    """Runs one situation."""
    del context
    return run_on_hosts(*DRILLS[name], folder)

"""Situations between hosts with one rank each: what is cut, and what must hold.

All hosts of a situation are namespaces of this machine (``hosts``); the ranks on them
are those of ``host_rank.py``.
"""

import functools
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.processes import Program
from hosts import COMMAND_S, GRACE_S, START_S, Hosts, run_on_hosts


def start_ranks(
    hosts: Hosts, size: int, timeout_s: float, stall_s: float
) -> list[Program]:
    """Starts ranks, which train soon."""
    options = size, timeout_s, stall_s
    return [hosts.python(r, "host_rank.py", r, *options) for r in range(size)]


def read_step(rank: Program) -> int:
    """Returns the latest step of a rank."""
    return max((int(n) for n in re.findall(r"(?m)^step (\d+)$", rank.out)), default=0)


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
    ranks = start_ranks(hosts, 2, timeout_s, 60.0)
    for rank in ranks:
        rank.wait_for("(?m)^step 20$")
    hosts.drop(1, 0)
    time.sleep(cut_s)
    hosts.heal()
    before = read_step(ranks[0])
    # Where the kernel has no bound on the time between TCP's retries, up to as long.
    for rank in ranks:
        rank.wait_for(f"(?m)^step {before + 20}$", within_s=cut_s + GRACE_S)
        assert "took" in rank.out.partition("step 20\n")[2], "nothing was cut"


def name_a_cut_off_rank(hosts: Hosts) -> None:
    """A host loses its network for good: it says that it may be itself."""
    ranks = start_ranks(hosts, 3, 5.0, 60.0)
    for rank in ranks:
        rank.wait_for("(?m)^step 20$")
    hosts.drop(1, 0, 2)
    ends = hear_ends(ranks, 5.0 + GRACE_S)
    for rank in (0, 2):
        assert "[1]" in ends[rank], ends
        assert "has been silent for" in ends[rank], ends
    assert "[0]" in ends[1], ends
    assert "or this rank is cut off itself" in ends[1], ends


def name_a_pair(hosts: Hosts) -> None:
    """Two ranks that reach rank 0 do not reach each other: both are named."""
    stall_s = 12.0
    ranks = start_ranks(hosts, 3, 5.0, stall_s)
    for rank in ranks:
        rank.wait_for("(?m)^step 20$")
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
    ranks = start_ranks(hosts, 3, 4.0, 600.0)
    for rank in ranks:
        rank.wait_for("(?m)^step 20$")
    hosts.slow_down(2, sender=1, bytes_per_s=20_000)
    for rank in ranks:
        told = rank.wait_for("reports a stall: (.*)", within_s=4.0 + 10.0).group(1)
        assert "rank 2 (" in told, told
        assert "receives" in told, told
        assert "rank 0 (" not in told, told
    hosts.heal()
    before = read_step(ranks[0])
    for rank in ranks:
        rank.wait_for(f"(?m)^step {before + 20}$", within_s=30.0)


def say_that_a_name_is_local(hosts: Hosts) -> None:
    """Host 0 is 127.0.1.1 to itself: rank 0 says so, and tw-launch ends at once."""
    hosts.name_locally(0)
    command = "-m tw_launch --nnodes 2 --coordinator node0:4001 -- true"
    launcher = hosts.run(0, sys.executable, *command.split())
    assert launcher.finish(COMMAND_S) == 2
    local = "node0 is 127.0.1.1 to itself, where other machines do not reach"
    assert f"--coordinator node0:4001: {local} node 0" in launcher.out
    rank = hosts.python(0, "host_rank.py", 0, 2, 5.0, 60.0)
    rank.wait_for(f"ranks can join from this machine alone: {local} rank 0")


SITUATIONS: dict[str, tuple[int, Callable[[Hosts], None]]] = {
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

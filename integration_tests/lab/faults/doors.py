"""Strangers at all ports of a run while it fits: nobody must notice.

    doors: launchers   node 0 of ``tw-launch --nnodes 2``, and rank 0's side channel
    doors: mpi         the table of ``tw-launch --mpi``, and rank 0's side channel

A first run is calm, and recorded. In the second, strangers send to every door what was
sent in the first, whole, in parts and mutated; hold 200 silent connections; send lines
without an end; and greet without reading the answers. What must hold: both runs learn
the same weights, bit for bit, and end with 0; and rank 0's launcher has not grown by
more than ``GROWTH_MIB``.
"""

import contextlib
import random
import re
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.ports import find_free_ports
from harness.processes import Program
from harness.rank_faults import NOISES, send_raw
from harness.relays import Relay
from harness.task_faults import Outcome

from tw_launch._key import draw_key

DRILLS = {"doors: launchers": 2, "doors: mpi": 1}  # and their launchers
GROWTH_MIB = 16
WITHIN_S = 240.0
PROGRAM = Path(__file__).with_name("doors_program.py")


@dataclass
class Run:
    """One run: its launchers, the relays to its doors, and where the doors are."""

    launchers: list[Program]
    relays: list[Relay]
    doors: list[int]
    recorded: list[bytes] = field(default_factory=list)

    def end(self) -> str:
        """Waits for the end; returns what all ranks have learned."""
        statuses = [one.finish(WITHIN_S) for one in self.launchers]
        said = "".join(one.out for one in self.launchers)
        learned = set(re.findall(r"learned (\w+)", said))
        assert statuses == [0] * len(statuses), f"{statuses}: {said[-500:]}"
        assert said.count("learned") == 2 and len(learned) == 1, said[-500:]
        sent = [one for relay in self.relays for one in relay.recorded.values()]
        self.recorded += map(bytes, sent)
        return learned.pop()


def run_drill(context: Any, name: str, folder: Path | None = None) -> Outcome:
    """Runs one trial."""
    with contextlib.ExitStack() as stack:
        try:
            key = draw_key()
            calm = _start(stack, DRILLS[name], key)
            wanted = calm.end()
            disturbed = _start(stack, DRILLS[name], key)
            before = _memory_mib(disturbed.launchers[0])
            most, tries = _disturb(disturbed, calm.recorded)
            assert disturbed.end() == wanted, "other weights"
            assert most - before <= GROWTH_MIB, f"{before} to {most} MiB"
        except (AssertionError, TimeoutError) as error:
            return Outcome(str(error) or type(error).__name__)
    return Outcome(remarks=f"{tries} tries, {most - before} MiB more")


def _start(stack: contextlib.ExitStack, count: int, key: str) -> Run:
    """Starts a run, and waits until it trains."""
    rank_0, node_0 = find_free_ports(2)
    relays = [Relay(rank_0), Relay(node_0)]
    for relay in relays:
        stack.callback(relay.end)
    ports = {"DOORS": f"{rank_0} {relays[0].port}", "TW_KEY": key}
    variables = [f"{name}={value}" for name, value in ports.items()]
    launchers = []
    for node in range(count):
        place = ["--mpi", "--workers", "2"]
        if count > 1:
            at = (node_0, relays[1].port)[node]
            place = ["--nnodes", count, "--node-rank", node, "--workers", "1"]
            place += ["--ps", "0", "--coordinator", f"127.0.0.1:{at}"]
        words = ["env", *variables, sys.executable, "-m"]
        command = ["--", sys.executable, "-u", PROGRAM]
        one = Program([*words, "tw_launch", *place, *command], deadline_s=WITHIN_S)
        stack.callback(one.kill)
        launchers.append(one)
    for one in launchers:
        one.wait_for("trains")
    run = Run(launchers, relays, [rank_0, node_0][:count])
    for port, number in re.findall(r"pmi (\d+) (\d+)", launchers[0].out):
        run.doors = [rank_0, int(port)]
        lines = f"cmd=initack pmiid={number}\ncmd=put key=P0 value=x\ncmd=barrier_in\n"
        run.recorded.append(lines.encode())
    return run


def _disturb(run: Run, recorded: Sequence[bytes]) -> tuple[int, int]:
    """Sends to the doors until the run ends; returns the launcher's MiB, and tries."""
    assert recorded, "nothing was recorded"
    is_over, tries, most = threading.Event(), [0], [0]

    def disturb(port: int) -> None:
        place = ("127.0.0.1", port)
        with contextlib.ExitStack() as held:
            while not is_over.wait(0.005):
                with contextlib.suppress(OSError):
                    client = send_raw(place, _choose(recorded))
                    tries[0] += 1
                    if tries[0] % 100 < 20:
                        held.callback(client.close)
                    else:
                        client.close()

    threads = [threading.Thread(target=disturb, args=(door,)) for door in run.doors]
    for thread in threads:
        thread.start()
    with contextlib.ExitStack() as silent:
        for door in run.doors:
            for _ in range(200):
                silent.enter_context(socket.create_connection(("127.0.0.1", door), 10))
        while run.launchers[0].poll() is None and "learned" not in run.launchers[0].out:
            most[0] = max(most[0], _memory_mib(run.launchers[0]))
            is_over.wait(0.2)
    is_over.set()
    for thread in threads:
        thread.join(20)
    return most[0], tries[0]


def _choose(recorded: Sequence[bytes]) -> bytes:
    """Returns what was sent before, in part or mutated, or noise."""
    sent = bytearray(random.choice(recorded))
    kind = random.choice(["whole", "line", "mutated", "noise", "endless"])
    if kind == "noise":
        return random.choice(NOISES)
    if kind == "endless":
        return b"x" * (1 << 20)
    if kind == "line":
        return random.choice(bytes(sent).splitlines(keepends=True) or [b""])
    for _ in range(random.randint(1, 5) if kind == "mutated" else 0):
        sent[random.randrange(len(sent))] = random.randrange(256)
    return bytes(sent)


def _memory_mib(launcher: Program) -> int:
    """Returns the memory of a launcher."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{launcher.pid}/status").read_text()
        if found := re.search(r"VmRSS:\s+(\d+)", status):
            return int(found[1]) // 1024
    return 0

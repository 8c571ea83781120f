"""One trial of each fault: what survivors raise, and after how many seconds."""

import time
from dataclasses import dataclass
from typing import Any

from syncrep_tasks import Tasks, eventually

# Fault to the type that survivors must raise.
FAULTS = {
    "worker killed": "ReplicaTimeoutError",
    "chief killed": "ChiefLostError",
    "ps killed": "ServerLostError",
    "ps stopped": "ServerLostError",
}
WAIT_S = 3.0


@dataclass(frozen=True)
class Report:
    """What one survivor raised, and how many seconds after the fault."""

    survivor: str
    error: str
    message: str
    facts: dict[str, Any]
    after_s: float


OPTIONS = {"wait_timeout_s": WAIT_S, "start_timeout_s": 60}
SPEC = {"kind": "towers", "aggregate": 2, "total": 2, "options": OPTIONS}


def run_trial(tasks: Tasks, fault: str, **changes: Any) -> list[Report]:
    """Trains, does harm, and listens to the survivors."""
    workers = tasks.train({**SPEC, **changes})
    for worker in workers:
        worker.say("steps", {"factor": 0.0, "count": 10**9})
    for worker in workers:  # until the steps run
        eventually(lambda: not worker.pipe.poll(0.3))  # noqa: B023
    victim = {"worker": workers[1], "chief": workers[0], "ps": tasks.servers[0]}[
        fault.split()[0]
    ]
    survivors = [worker for worker in workers if worker is not victim]
    began = time.monotonic()
    victim.stop() if fault.endswith("stopped") else victim.kill()
    return [_hear(survivor, began) for survivor in survivors]


def _hear(survivor: Any, began: float) -> Report:
    word, *rest = survivor.hear(WAIT_S + 20)
    after_s = time.monotonic() - began
    assert word == "raised", (survivor.name, word, rest)
    return Report(survivor.name, *rest, after_s)

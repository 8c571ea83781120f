"""One trial of each fault: what survivors raise, and what goes on after it."""

import time
from collections.abc import Callable
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
    workers = _stepping(tasks, **changes)
    victim = {"worker": workers[1], "chief": workers[0], "ps": tasks.servers[0]}[
        fault.split()[0]
    ]
    survivors = [worker for worker in workers if worker is not victim]
    began = time.monotonic()
    victim.stop() if fault.endswith("stopped") else victim.kill()
    return [_hear(survivor, began) for survivor in survivors]


def start_afresh(tasks: Tasks) -> None:
    """Workers are killed while their server stands still; then others start."""
    (server,) = tasks.servers
    workers = _stepping(tasks)
    server.stop()
    time.sleep(1.0)
    for worker in workers:
        worker.kill()
    server.go_on()
    tasks.train(SPEC)
    _step_until(tasks, 5)


def restart_chief(tasks: Tasks) -> None:
    """A chief is killed between two steps; the next goes on with what servers hold."""
    tasks.train(SPEC)
    _step_until(tasks, 20)
    before, _ = tasks.workers[1].ask("read")
    tasks.workers[0].kill()
    chief = tasks.restart("worker", 0, "train", SPEC)
    step, variables = chief.ask("read")
    assert step == before >= 20
    _expect_exact(step, variables)
    _step_until(tasks, before + 10)
    _expect_exact(*chief.ask("read"))


def restart_chief_in_a_step(tasks: Tasks) -> None:
    """A chief is killed while steps run: none is applied twice, at most one lost."""
    tasks.train(SPEC)
    _step_until(tasks, 20)
    for worker in tasks.workers:
        worker.say("steps", {"factor": 1.0, "count": 10**9})
    time.sleep(0.5)
    tasks.workers[0].kill()
    chief = tasks.restart("worker", 0, "train", SPEC)
    step, variables = chief.ask("read")
    assert step >= 20, f"the steps before were lost: {step}"
    _expect_exact(step, variables)
    chief.ask("steps", {"factor": 1.0, "count": 10})
    _expect_exact(*chief.ask("read"))


RECOVERIES: dict[str, Callable[[Tasks], None]] = {
    "fresh start after a pause": start_afresh,
    "chief restarted": restart_chief,
    "chief restarted in a step": restart_chief_in_a_step,
}


def _stepping(tasks: Tasks, *, factor: float = 0.0, **changes: Any) -> list[Any]:
    workers = tasks.train({**SPEC, **changes})
    for worker in workers:
        worker.say("steps", {"factor": factor, "count": 10**9})
    for worker in workers:  # until the steps run
        eventually(lambda: not worker.pipe.poll(0.3))  # noqa: B023
    return workers


def _step_until(tasks: Tasks, step: int) -> None:
    # By step and not by count: a batch for an older incarnation does not count.
    for worker in tasks.workers:
        worker.say("until", {"factor": 1.0, "step": step})
    for worker in tasks.workers:
        assert not worker.expect("done")


def _expect_exact(step: int, variables: dict[str, Any]) -> None:
    """Gradient descent with rate 0.5: every step counts once in every variable."""
    for place, weight in enumerate((1.0, 2.0, 4.0)):
        found = variables["model/w:0"][place]
        assert found == 1.0 - 0.5 * weight * step, (step, variables)
    assert variables["model/b:0"] == -0.5 * step


def _hear(survivor: Any, began: float) -> Report:
    word, *rest = survivor.hear(WAIT_S + 20)
    after_s = time.monotonic() - began
    assert word == "raised", (survivor.name, word, rest)
    return Report(survivor.name, *rest, after_s)

"""Drills: harm is done to one task of a run, and what must hold then is checked.

Every fault meets every victim (a worker, the chief, the parameter server), and is
undone in each of three ways:

    fault        what happens             undone by
    killed       SIGKILL                  a new process
    stopped      SIGSTOP                  SIGKILL and a new process
    paused       SIGSTOP                  SIGCONT
    cut          the link is taken down   a new process at the same address
    interrupted  the link is taken down   bringing it up

    after        undone                   what the others do
    in time      within the deadline      notice nothing, and go on
    retried      when they have raised    catch that, and go on in a new session
    new run      when they have raised    end; all workers start anew

Left out is "interrupted, new run" of a worker and of the chief: they raise and end by
themselves while the link is down, so bringing it up finds no one.

What must hold: whoever waits returns, or raises the right error within
``wait_timeout_s`` plus ``GRACE_S`` of the fault. All replicas then go on to the same
step, where every variable has the mean of every step in it once, and end in order. No
step is lost that servers or the last checkpoint hold, whichever the run goes on from.
Who was paused or cut off and comes back when the others have raised goes on with them,
or raises one of our errors.

A further expectation is a row of ``DRILLS`` with ``options`` of the optimizer; where
the others are to do something else, it has a function of its own in ``AFTER``.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from harness.processes import wait_until
from harness.tasks import Task, Tasks

WAIT_S = 3.0
GRACE_S = 1.0
PATIENT_S = 20.0  # where nobody is to raise while a process starts
OUTAGE_S = 1.0
RESUMED_S = 2.0  # after the deadline, where others take over
FIRST_STEPS, STEPS = 5, 200
SAVE_EVERY = 20
FINISH_S = 60.0
OPTIONS = {"wait_timeout_s": WAIT_S, "start_timeout_s": 60}
SPEC = {"kind": "towers", "aggregate": 2, "total": 2, "options": OPTIONS}

LINK_FAULTS = ("cut", "interrupted")
STANDSTILLS = ("paused", "interrupted")
"""Faults after which the same process goes on."""
FAULTS = ("killed", "stopped", "paused", *LINK_FAULTS)
RAISED = {
    "worker": "ReplicaTimeoutError",
    "chief": "ChiefLostError",
    "ps": "ServerLostError",
}
OURS = {*RAISED.values(), "StartTimeoutError"}


@dataclass(frozen=True)
class Drill:
    """A fault, whom it befalls, and what comes after."""

    fault: str  # one of ``FAULTS``
    victim: str  # worker, chief or ps
    after: str  # a key of ``AFTER``
    # Of the optimizer, besides ``OPTIONS``
    options: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 0  # steps that may be repeated though servers hold them

    @property
    def restores(self) -> bool:
        """Whether the run goes on from the last checkpoint.

        It does where the server's variables have ended with it, and where all replicas
        are new processes.
        """
        is_new = self.fault not in STANDSTILLS
        return self.after == "new run" or (is_new and self.victim == "ps")


@dataclass(frozen=True)
class Report:
    """What one task raised, and how many seconds after the fault."""

    task: str
    error: str
    message: str
    facts: dict[str, Any]
    after_s: float


@dataclass(frozen=True)
class Outcome:
    """What a trial has shown."""

    failure: str = ""  # what did not hold; empty in a good trial
    # Seconds beyond the deadline at which the last error came; None where nobody raised
    beyond_s: float | None = None
    # Seconds of the longest call of a replica; None where it is not known
    longest_s: float | None = None
    # Steps that were lost though servers or the last checkpoint held them
    lost: int = 0
    remarks: str = ""  # what else there was to see


class Trial:
    """One run in which one fault happens."""

    def __init__(self, tasks: Tasks, drill: Drill, folder: Path) -> None:
        self.tasks = tasks
        self.drill = drill
        self.folder = folder
        self.reports: list[Report] = []
        self.saved = 0
        self.witnesses: list[Task] = []
        self.records: dict[Task, Any] = {}
        self.remarks: list[str] = []
        wait_s = PATIENT_S if self._needs_patience() else WAIT_S
        options = {**OPTIONS, "wait_timeout_s": wait_s, **drill.options}
        self.spec = {**SPEC, "options": options, "retries": drill.after == "retried"}
        if drill.restores:
            self.spec |= {"checkpoint_dir": str(folder), "save_steps": SAVE_EVERY}

    def run(self) -> Outcome:
        failure = ""
        try:
            self.begin()
            AFTER[self.drill.after](self)
            self.finish()
        except (AssertionError, TimeoutError) as error:
            failure = str(error) or type(error).__name__
        lost = max((self._lost(*record) for record in self.records.items()), default=0)
        if not failure and lost > self.drill.repeats:
            failure = f"{lost} steps were lost"
        longest_s = [record.longest_s for record in self.records.values()]
        return Outcome(
            failure,
            max((report.after_s - WAIT_S for report in self.reports), default=None),
            max(longest_s, default=None),
            lost,
            ", ".join(self.remarks),
        )

    def begin(self) -> None:
        """Has the replicas train; returns at some moment of a step."""
        self.tasks.train(self.spec)
        self.tasks.step_until(FIRST_STEPS)
        self._send_off(self.tasks.workers)
        time.sleep(random.uniform(0.02, 0.3))

    @property
    def victim(self) -> Task:
        if self.drill.victim == "ps":
            return self.tasks.servers[0]
        return self.tasks.workers[0 if self.drill.victim == "chief" else 1]

    @property
    def survivors(self) -> list[Task]:
        return [worker for worker in self.tasks.workers if worker is not self.victim]

    def harm(self) -> None:
        for worker in self.tasks.workers:
            assert not worker.pipe.poll(), f"{worker.name} said: {worker.hear()}"
        self.witnesses = self.tasks.workers.copy()
        self.began = time.monotonic()
        {
            "killed": self.victim.kill,
            "stopped": self.victim.stop,
            "paused": self.victim.stop,
            "cut": lambda: self.tasks.cut(self.victim),
            "interrupted": lambda: self.tasks.cut(self.victim),
        }[self.drill.fault]()
        self.saved = _last_checkpoint(self.folder)

    def undo(self) -> None:
        if self.drill.fault == "paused":
            self.victim.go_on()
        elif self.drill.fault == "interrupted":
            self.tasks.mend(self.victim)
        else:
            self.replace()

    def replace(self) -> None:
        """Starts a new process in the victim's place."""
        job, index = self.victim.name.split()
        self.victim.kill()
        if job == "ps":
            self.tasks.restart(job, int(index), "serve", {})
        else:
            successor = self.tasks.restart(job, int(index), "train", self.spec)
            self._send_off([successor])

    def hear_errors(self, word: str) -> None:
        """Has everyone who waits raise the right error in time."""
        for worker in self.survivors:
            self._hear_error(worker, word, {RAISED[self.drill.victim]})
        if self.drill.fault in LINK_FAULTS and self.drill.victim != "ps":
            self._hear_error(self.victim, word, {"ServerLostError"})

    def hear_victim(self) -> None:
        """Has a victim raise that goes on when the others have ended."""
        self.began = time.monotonic()
        self._hear_error(self.victim, "raised", OURS)

    def start_anew(self) -> None:
        """Starts all workers anew, from the last checkpoint."""
        for worker in self.tasks.workers:
            worker.process.join(10)
            assert not worker.process.is_alive(), f"{worker.name} has not ended"
        self.saved = _last_checkpoint(self.folder)
        self.tasks.train(self.spec)
        self._send_off(self.tasks.workers)

    def finish(self) -> None:
        """Has all come to the last step, where the numbers are exact, and end."""
        until = time.monotonic() + FINISH_S
        for worker in self.tasks.workers:
            self._hear_done(worker, until)
        for worker in self.tasks.workers:
            self.records[worker] = worker.ask("recorded")
        step, variables = self.tasks.workers[0].ask("read")
        status, _ = self.tasks.workers[0].ask("status")
        if status.cut_off:
            self.remarks.append(f"{status.cut_off} round cut off")
        assert step >= FIRST_STEPS + STEPS, f"ended at step {step}"
        expect_exact(step, variables, cut_off=status.cut_off)
        for worker in self.tasks.workers:
            worker.say("end")
        for worker in self.tasks.workers:
            worker.expect("closed")

    def _needs_patience(self) -> bool:
        return self.drill.after == "in time" and self.drill.fault not in STANDSTILLS

    def _send_off(self, workers: list[Task]) -> None:
        for worker in workers:
            worker.say("until", {"factor": 1.0, "step": FIRST_STEPS + STEPS})

    def _hear_error(self, task: Task, word: str, errors: set[str]) -> None:
        got, *rest = task.hear(WAIT_S + 20)
        after_s = time.monotonic() - self.began
        assert got == word, f"{task.name}: wanted {word}, got {got} {rest}"
        report = Report(task.name, *rest, after_s)
        self.reports.append(report)
        assert report.error in errors, f"{report}"
        assert after_s <= WAIT_S + GRACE_S, f"too late: {report}"

    def _hear_done(self, worker: Task, until: float) -> None:
        """Hears of new sessions until the worker has come to the last step."""
        while True:
            word, *rest = worker.hear(max(0.1, until - time.monotonic()))
            if word == "done":
                assert not rest[0], f"{worker.name} was stopped"
                return
            assert word in ("created", "lost") and self.spec["retries"], (
                f"{worker.name}: {word} {rest}"
            )
            if word == "lost":
                self.remarks.append(f"{worker.name}: {rest[0]}")

    def _lost(self, worker: Task, record: Any) -> int:
        """Returns how many steps it has seen anew, or begun below the checkpoint."""
        if worker not in self.witnesses:
            return max(0, self.saved - record.first)
        if self.drill.restores and record.fell_back is not None:
            return max(0, self.saved - record.fell_back[1])
        return int(record.fall)


def in_time(trial: Trial) -> None:
    trial.harm()
    time.sleep(0.0 if trial.drill.fault == "killed" else OUTAGE_S)
    trial.undo()


def retried(trial: Trial) -> None:
    trial.harm()
    trial.hear_errors("lost")
    trial.undo()


def new_run(trial: Trial) -> None:
    trial.harm()
    trial.hear_errors("raised")
    if trial.drill.victim == "ps":
        trial.undo()
    elif trial.drill.fault == "paused":
        trial.undo()
        trial.hear_victim()
    else:
        trial.victim.kill()
    trial.start_anew()


AFTER: dict[str, Callable[[Trial], None]] = {
    "in time": in_time,
    "retried": retried,
    "new run": new_run,
}
_ROWS = [
    Drill(fault, victim, after)
    for fault, victim, after in product(FAULTS, RAISED, AFTER)
    if victim == "ps" or (fault, after) != ("interrupted", "new run")
]
DRILLS = {f"{row.victim} {row.fault}, {row.after}": row for row in _ROWS}


def start_afresh(tasks: Tasks) -> None:
    """Workers are killed while their server stands still; then others start."""
    (server,) = tasks.servers
    workers = tasks.train(SPEC)
    for worker in workers:
        worker.say("steps", {"factor": 0.0, "count": 10**9})
    for worker in workers:  # until the steps run
        wait_until(lambda: not worker.pipe.poll(0.3))  # noqa: B023
    server.stop()
    time.sleep(1.0)
    for worker in workers:
        worker.kill()
    server.go_on()
    tasks.train(SPEC)
    tasks.step_until(5)


def restart_chief(tasks: Tasks) -> None:
    """A chief is killed between two steps; the next goes on with what servers hold."""
    tasks.train(SPEC)
    tasks.step_until(20)
    before, _ = tasks.workers[1].ask("read")
    tasks.workers[0].kill()
    chief = tasks.restart("worker", 0, "train", SPEC)
    step, variables = chief.ask("read")
    assert step == before >= 20
    expect_exact(step, variables)
    tasks.step_until(before + 10)
    expect_exact(*chief.ask("read"))


def lose_server_again_and_again(tasks: Tasks) -> None:
    """A server is paused for too long; the same processes go on. Four times."""
    spec = {**SPEC, "retries": True}
    tasks.train(spec)
    tasks.step_until(20)
    for loss in range(1, 5):
        for worker in tasks.workers:
            worker.say("until", {"factor": 1.0, "step": 100 * loss})
        tasks.servers[0].stop()
        for worker in tasks.workers:
            assert worker.hear(WAIT_S + 20)[:2] == ("lost", "ServerLostError")
        tasks.servers[0].go_on()
        for worker in tasks.workers:
            _hear_done_retrying(worker)
            assert worker.ask("recorded").fell_back is None
        expect_exact(*tasks.workers[0].ask("read"))


def fail_in_a_hook(tasks: Tasks) -> None:
    """A user's hook raises AbortedError once, in each replica's first session."""
    tasks.train({**SPEC, "fails_once": True})
    tasks.step_until(50)
    step, variables = tasks.workers[0].ask("read")
    assert step == 50
    expect_exact(step, variables)


ELASTIC = {
    **SPEC,
    "aggregate": 3,
    "total": 3,
    "options": {**OPTIONS, "elastic": True},
}


def kill_elastic_chief(tasks: Tasks) -> None:
    """A chief is killed in a step: another replica goes on, and it comes back."""
    _harm_elastic(tasks, 0, Task.kill)
    tasks.restart("worker", 0, "train", ELASTIC)
    _go_on_together(tasks)


def pause_elastic_chief(tasks: Tasks) -> None:
    """A chief is paused for longer than the deadline; it goes on as another replica."""
    _harm_elastic(tasks, 0, Task.stop)
    tasks.workers[0].go_on()
    tasks.workers[0].expect("done")
    _go_on_together(tasks)


def pause_elastic_worker(tasks: Tasks) -> None:
    """A worker is paused for longer than the deadline, and comes back."""
    _harm_elastic(tasks, 2, Task.stop)
    tasks.workers[2].go_on()
    tasks.workers[2].expect("done")
    _go_on_together(tasks)


def _harm_elastic(tasks: Tasks, victim: int, harm: Callable[[Task], None]) -> None:
    """Does harm in a step; the others resume by themselves, and lose no step."""
    tasks.train(ELASTIC)
    tasks.step_until(20)
    for worker in tasks.workers:
        worker.say("until", {"factor": 1.0, "step": 2000})
    time.sleep(0.3)
    harm(tasks.workers[victim])
    for number, worker in enumerate(tasks.workers):
        if number == victim:
            continue
        assert not worker.expect("done")
        record = worker.ask("recorded")
        assert record.fell_back is None, record.fell_back
        repeated = record.calls - record.highest
        assert repeated <= 1, f"{repeated} rounds were repeated"
        late_s = record.longest_s - WAIT_S
        assert late_s <= RESUMED_S, f"resumed {late_s:.2f} s after the deadline"
    status, _ = tasks.workers[1].ask("status")
    assert status.evictions == 1, status
    assert (status.chief == 0) == (victim != 0), status
    expect_exact(*tasks.workers[1].ask("read"), cut_off=status.cut_off)


def _go_on_together(tasks: Tasks) -> None:
    """All take part again, under whoever acts as the chief."""
    before, _ = tasks.workers[1].ask("status")
    tasks.step_until(before.step + 50)
    after, _ = tasks.workers[1].ask("status")
    assert (after.evicted, len(after.joined)) == ((), 3), after
    assert (after.chief, after.incarnation) == (before.chief, before.incarnation)
    expect_exact(*tasks.workers[0].ask("read"), cut_off=after.cut_off)


SCENES: dict[str, Callable[[Tasks], None]] = {
    "workers killed while the server is paused": start_afresh,
    "chief killed between two steps": restart_chief,
    "server paused four times, retried": lose_server_again_and_again,
    "a hook aborts the first session": fail_in_a_hook,
    "elastic, chief killed": kill_elastic_chief,
    "elastic, chief paused": pause_elastic_chief,
    "elastic, worker paused": pause_elastic_worker,
}


def run_drill(context: Any, name: str, folder: Path) -> Outcome:
    """Runs one trial in a cluster of its own, of which no process is left."""
    tasks = Tasks(context, workers=workers_of(name), linked=is_linked(name))
    try:
        tasks.serve()
        if name in DRILLS:
            return Trial(tasks, DRILLS[name], folder).run()
        SCENES[name](tasks)
    except (AssertionError, TimeoutError) as error:
        return Outcome(str(error) or type(error).__name__)
    finally:
        tasks.kill()
    return Outcome()


def workers_of(name: str) -> int:
    """Returns how many replicas a drill takes."""
    return 3 if name.startswith("elastic") else 2


def is_linked(name: str) -> bool:
    """Returns whether a drill takes links down."""
    return name in DRILLS and DRILLS[name].fault in LINK_FAULTS


def why_no_links(context: Any) -> str | None:
    """Returns why the system does not allow links, None where it does."""
    hub = Task(context, "hub", "hub", {}, {})
    try:
        word, *rest = hub.hear()
    finally:
        hub.kill()
    if word == "bridged":
        return None
    kind, message, _ = rest
    assert kind in ("OSError", "PermissionError", "FileNotFoundError"), rest
    return f"{kind}: {message}"


def expect_exact(step: int, variables: dict[str, Any], *, cut_off: int = 0) -> None:
    """Gradient descent with rate 0.5: every step counts once in every variable.

    Some variables may have missed rounds that were cut off.
    """
    counts = {
        f"model/w:0[{place}]": (1.0 - variables["model/w:0"][place]) / (0.5 * weight)
        for place, weight in enumerate((1.0, 2.0, 4.0))
    }
    counts["model/b:0"] = variables["model/b:0"] / -0.5
    counts["global_step:0"] = step
    spread = max(counts.values()) - min(counts.values())
    assert spread <= cut_off, f"means by variable: {counts}; {cut_off} rounds cut off"


def _hear_done_retrying(worker: Task) -> None:
    while (got := worker.hear())[0] != "done":
        assert got[0] in ("created", "lost"), (worker.name, got)


def _last_checkpoint(folder: Path) -> int:
    """Returns the step that the next restored run begins with."""
    listed = folder / "checkpoint"
    if not listed.exists():
        return 0
    latest = listed.read_text().splitlines()[0]
    return int(latest.strip('"').rpartition("-")[2])

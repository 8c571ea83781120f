"""The tasks of this machine, which are started and ended on node 0's orders.

TensorFlow takes nearly all memory of every GPU that a process sees, so no two workers
may see the same one: each gets its share of the GPUs that CUDA_VISIBLE_DEVICES lists.
"""

import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from tw_launch._launcher.messages import Ended, Idle, Restart, Start, Stop
from tw_launch._launcher.plan import Share, TaskPlan, plan_tasks
from tw_launch._launcher.pmi import PmiTable
from tw_launch._launcher.task import Ends, Keeper, TaskProcess
from tw_launch._network_exposure import hold_free_ports

_KILLED_S = 10.0
_REPORTS_S = 1.0
_LAST_LINES_S = 1.0


class Machine:
    """The tasks of one machine, which all run one command."""

    def __init__(
        self,
        share: Share,
        command: Sequence[str],
        *,
        grace_s: float,
        log_dir: Path | None,
        on_end: Callable[[TaskProcess], None],
    ) -> None:
        """Starts nothing yet; ``on_end`` gets, in a thread, processes to ``take``."""
        self.share = share
        self._command, self._grace_s, self._log_dir = command, grace_s, log_dir
        self._on_end, self._ends, self._keeper = on_end, Ends(), Keeper()
        self._plans: dict[str, TaskPlan] = {}
        self._processes: dict[str, TaskProcess] = {}
        self._starts: Counter[str] = Counter()
        self._asked: set[int] = set()
        self._deadline: float | None = None
        self._owes_idle = False
        self._mpi: PmiTable | None = None
        self._held: dict[int, socket.socket] = {}

    def find_ports(self) -> tuple[int, ...]:
        """Finds free ports for its servers and workers, and holds them for these."""
        self._release_ports()
        self._held = hold_free_ports(self.share.ps + self.share.workers)
        return tuple(self._held)

    def _release_ports(self) -> None:
        while self._held:
            self._held.popitem()[1].close()

    def obey(self, order: Start | Restart | Stop) -> None:
        """Carries out an order of node 0 without waiting for its completion."""
        match order:
            case Start():
                if self.share.uses_mpi:
                    self._close_mpi()
                    self._mpi = PmiTable(self.share.workers)
                plans = plan_tasks(self.share, order, self._mpi)
                self._plans = {plan.name: plan for plan in plans}
                self._asked, self._deadline = set(), None
                self._processes = {}
                for plan in plans:
                    self._start(plan)
            case Restart(task):
                self._start(self._plans[task])
            case Stop():
                self._owes_idle = True
                self.ask_to_end(signal.SIGTERM)

    def take(self, process: TaskProcess) -> Ended | None:
        """Reports the end of a process; None if its task was started again since."""
        is_current = self._processes.get(process.plan.name) is process
        return process.report() if is_current else None

    def failures(self) -> list[Ended]:
        """Lists the tasks that failed on their own since the last start of all."""
        ended = [p.report() for p in self._processes.values() if p.has_ended.is_set()]
        told = {128 + number for number in (*self._asked, signal.SIGKILL)}
        expected = {0, *(told if self._asked else ())}
        return [one for one in ended if one.status not in expected]

    def tick(self) -> Idle | None:
        """Kills overdue tasks, and answers ``Stop`` once; call ten times a second."""
        running = self._running()
        late_s = 0.0 if self._deadline is None else time.monotonic() - self._deadline
        if running and late_s > 0:
            _send(running, signal.SIGKILL)
            if late_s > _KILLED_S:
                names = ", ".join(process.plan.name for process in running)
                raise RuntimeError(f"{names}: not gone {_KILLED_S:g} s after SIGKILL")
        if running or not self._owes_idle:
            return None
        self._owes_idle = False
        return Idle(self.find_ports())

    def ask_to_end(self, number: int) -> None:
        """Sends all tasks a signal; ``tick`` kills those that outlive the grace period.

        All share one grace period, which begins with the first signal.
        """
        if self.share.uses_mpi and not self._asked:
            self._await_reports()
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace_s
        if number not in self._asked:
            _send(self._running(), number)
        self._asked.add(number)

    def _await_reports(self) -> None:
        """Leaves workers a second to report that another has failed."""
        ended = [p for p in self._processes.values() if p.has_ended.is_set()]
        end_s = time.monotonic() + _REPORTS_S
        for process in self._running() if any(p.report().status for p in ended) else ():
            process.has_ended.wait(max(0.0, end_s - time.monotonic()))

    def _close_mpi(self) -> None:
        if self._mpi is not None:
            self._mpi.close()

    def end(self, number: int) -> None:
        """Ends all tasks and waits until they have; none can be started again."""
        self._owes_idle = False
        self.ask_to_end(number)
        while running := self._running():
            running[0].has_ended.wait(0.1)
            self.tick()
        self._ends.close()
        self._keeper.close()
        self._close_mpi()
        self._release_ports()
        end = time.monotonic() + _LAST_LINES_S
        for process in self._processes.values():
            process.wait_for_output(max(0.0, end - time.monotonic()))

    def _running(self) -> list[TaskProcess]:
        return [p for p in self._processes.values() if not p.has_ended.is_set()]

    def _start(self, plan: TaskPlan) -> None:
        """Starts a task, unless all tasks are being ended."""
        if self._asked:
            return
        log = None
        if self._log_dir is not None:
            log = (
                self._log_dir / f"{plan.job}-{plan.index}.{self._starts[plan.name]}.log"
            )
        self._starts[plan.name] += 1
        self._processes[plan.name] = TaskProcess(
            plan,
            self._command,
            log=log,
            ends=self._ends,
            keeper=self._keeper,
            on_end=self._on_end,
        )


def _send(processes: Sequence[TaskProcess], number: int) -> None:
    for process in processes:
        process.send(number)


_LISTING_S = 30.0


def find_gpus(*, driver: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[str, ...]:
    """Lists usable GPUs, as CUDA_VISIBLE_DEVICES does, without loading CUDA."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(map(str, range(_count_gpus(driver))))
    # As in CUDA, an entry that names no device ends the list.
    entries = (entry.strip() for entry in listed.split(","))
    gpus = tuple(takewhile(_names_device, entries))
    if twice := sorted({gpu for gpu in gpus if gpus.count(gpu) > 1}):
        raise ValueError(
            f"find_gpus: CUDA_VISIBLE_DEVICES must list each GPU once; got {listed!r}, "
            f"which repeats {', '.join(twice)}."
        )
    return gpus


def share_gpus(
    gpus: Sequence[str], *, workers: int, per_task: int | None
) -> tuple[str | None, ...]:
    """Returns each worker's CUDA_VISIBLE_DEVICES; "" hides all, None leaves it."""
    if per_task is None:
        if not gpus or not workers:
            return (None,) * workers
        per_task = len(gpus) // workers
    if per_task * workers > len(gpus):
        there_are = f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none"
        raise ValueError(
            f"share_gpus: --gpus-per-task {per_task} of {workers} workers needs "
            f"{per_task * workers} GPUs; there are {there_are}. Use fewer GPUs or "
            "workers, or 0 to train without GPUs."
        )
    starts = [worker * per_task for worker in range(workers)]
    return tuple(",".join(gpus[start : start + per_task]) for start in starts)


def _names_device(entry: str) -> bool:
    return entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))


def _count_gpus(driver: Path) -> int:
    """Counts the GPUs that ``nvidia-smi`` lists, or else the driver's folders.

    In a container, these may include GPUs that this process must not use.
    """
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_LISTING_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return len(list(driver.iterdir())) if driver.is_dir() else 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())

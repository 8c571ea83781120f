"""Plans the tasks of a launch, and supervises them: restarts, failure, end, signals."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, TextIO

from tw_syncrep._gpus import share_gpus

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_KILLED_S = 10.0
_LAST_LINES_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class TaskPlan:
    """One task.

    Attributes:
      job: "ps", "worker" or "evaluator".
      index: within the job.
      tf_config: JSON.
      gpus: its CUDA_VISIBLE_DEVICES; None leaves the variable as it is.
    """

    job: str
    index: int
    tf_config: str
    gpus: str | None = None

    @property
    def name(self) -> str:
        """As it is shown, e.g. "worker 1"."""
        return f"{self.job} {self.index}"

    @property
    def decides(self) -> bool:
        """Whether the run is over when all such tasks have ended well."""
        return self.job == "worker"

    @property
    def variables(self) -> dict[str, str]:
        """What is added to the environment."""
        variables = {"TF_CONFIG": self.tf_config}
        if self.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpus
        return variables


def plan_tasks(
    *,
    ps: int,
    workers: int,
    evaluators: int,
    ports: Sequence[int],
    gpus: Sequence[str] = (),
    gpus_per_task: int | None = None,
) -> tuple[TaskPlan, ...]:
    """Plans a cluster on this machine.

    Args:
      ps: parameter servers.
      workers: replicas; the first is the chief.
      evaluators: tasks outside the cluster, 0 or 1.
      ports: one per parameter server and worker.
      gpus: of this machine, as in CUDA_VISIBLE_DEVICES.
      gpus_per_task: of each worker; by default as many as there are for each.

    Returns:
      The tasks, parameter servers first. Only workers have GPUs.

    Raises:
      ValueError: the counts make no cluster, or there are too few GPUs.
    """
    if ps < 0 or workers < 1 or evaluators not in (0, 1):
        raise ValueError(
            "plan_tasks: needs ps >= 0, workers >= 1 and 0 or 1 evaluator; got "
            f"{ps}, {workers} and {evaluators}."
        )
    shares = share_gpus(gpus, workers=workers, per_task=gpus_per_task)
    addresses = [f"localhost:{port}" for port in ports]
    cluster = {"ps": addresses[:ps], "worker": addresses[ps : ps + workers]}
    cluster = {job: listed for job, listed in cluster.items() if listed}
    counts = {"ps": ps, "worker": workers, "evaluator": evaluators}
    return tuple(
        TaskPlan(
            job,
            index,
            json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}),
            gpus=shares[index] if job == "worker" else "",
        )
        for job, count in counts.items()
        for index in range(count)
    )


class TaskProcess:
    """One task, which may be started several times.

    Attributes:
      plan: which task.
      starts: how many times it was started.
      status: how it ended, as a shell reports it; None while it runs.
    """

    def __init__(self, plan: TaskPlan, command: Sequence[str]) -> None:
        """Starts nothing yet."""
        self.plan = plan
        self.starts = 0
        self.status: int | None = None
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the task; call it from the main thread, whose end ends the task."""
        self.starts += 1
        self.status = None
        libc = ctypes.CDLL(None)
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **self.plan.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        pairs = [(self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)]
        self._readers = [self._pass_on(theirs, ours) for theirs, ours in pairs]

    def poll(self) -> int | None:
        """Returns how the task ended: 0 to 255, None while it runs."""
        if self.status is None and self._process is not None:
            code = self._process.poll()
            if code is not None:
                self._end_children()
                # As a shell reports a signal.
                self.status = code if code >= 0 else 128 - code
        return self.status

    def send(self, number: int) -> None:
        """Sends a signal to the task and its children, if it runs."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end; returns whether it came."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self.poll()
        return True

    def wait_for_output(self, timeout_s: float) -> bool:
        """Waits until all that an ended task wrote is passed on; returns whether it is.

        It never is while a process that left the task's group keeps its output open.
        """
        end = time.monotonic() + timeout_s
        for reader in self._readers:
            reader.join(max(0.0, end - time.monotonic()))
        return not any(reader.is_alive() for reader in self._readers)

    def _end_children(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _pass_on(
        self, theirs: IO[bytes] | None, ours: TextIO | None
    ) -> threading.Thread:
        def read() -> None:
            for line in theirs or ():
                text = line.decode(errors="replace").rstrip("\n")
                say(ours, f"[{self.plan.name}] {text}\n")

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        return reader


class Supervisor:
    """Runs tasks until the run is over.

    Attributes:
      tasks: not started yet.
      max_restarts: how often a task is started again after a failure.
      grace_s: seconds between asking a task to end and killing it.
      min_workers: with so many left, the run goes on without workers that failed for
        good; None where it ends with the first.
    """

    def __init__(
        self,
        tasks: Sequence[TaskProcess],
        *,
        max_restarts: int,
        grace_s: float,
        min_workers: int | None = None,
    ) -> None:
        """Keeps the arguments."""
        self.tasks = list(tasks)
        self.max_restarts = max_restarts
        self.grace_s = grace_s
        self.min_workers = min_workers
        self._given_up: list[TaskProcess] = []
        self._signal: int | None = None
        self._servers_reported: set[str] = set()
        self._woken = threading.Event()

    def run(self) -> int:
        """Starts the tasks and returns the exit status of the run.

        0 when all workers ended well; the status of the first task that failed
        for good; 128 plus the signal's number when a signal ended the run.
        """
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            for task in self.tasks:
                task.start()
            status = self._watch()
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)
        return status

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signal = number
        self._woken.set()

    def _watch(self) -> int:
        while True:
            if self._signal is not None:
                self._say(f"got {signal.Signals(self._signal).name}, passing it on")
                return 128 + self._signal
            for task in self.tasks:
                has_failed = task.poll() and task not in self._given_up
                if has_failed and not (self._restart(task) or self._give_up(task)):
                    return task.status or 1
            deciding = self._workers_left()
            if all(task.poll() == 0 for task in deciding):
                return 0
            self._report_ended_servers()
            self._woken.wait(_POLL_S)

    def _workers_left(self) -> list[TaskProcess]:
        return [t for t in self.tasks if t.plan.decides and t not in self._given_up]

    def _give_up(self, task: TaskProcess) -> bool:
        """Returns whether the run goes on without a task that failed for good."""
        failed = (
            f"{task.plan.name} failed with status {task.status} after {task.starts} "
            "start(s)"
        )
        left = len(self._workers_left()) - 1
        if self.min_workers is None or not task.plan.decides or left < self.min_workers:
            self._say(f"{failed}; ending all tasks")
            return False
        self._given_up.append(task)
        self._say(f"{failed}; going on with {left} workers")
        return True

    def _restart(self, task: TaskProcess) -> bool:
        if task.starts > self.max_restarts:
            return False
        self._say(
            f"{task.plan.name} failed with status {task.status}; restart "
            f"{task.starts} of {self.max_restarts}"
        )
        task.start()
        return True

    def _report_ended_servers(self) -> None:
        """Says once of each server that ended well that the workers are without it.

        It may be meant, as of a server that waits until the workers are done, so that
        the run goes on.
        """
        for task in self.tasks:
            name = task.plan.name
            ended = task.plan.job == "ps" and task.status == 0
            if ended and name not in self._servers_reported:
                self._servers_reported.add(name)
                self._say(f"{name} ended with status 0 before the workers")

    def _end_all(self) -> None:
        running = [task for task in self.tasks if task.poll() is None]
        for task in running:
            task.send(signal.SIGTERM if self._signal is None else self._signal)
        late = _late(TaskProcess.wait, running, within_s=self.grace_s)
        for task in late:
            task.send(signal.SIGKILL)
        _late(TaskProcess.wait, late, within_s=_KILLED_S)
        _late(TaskProcess.wait_for_output, self.tasks, within_s=_LAST_LINES_S)

    def _say(self, text: str) -> None:
        say(sys.stderr, f"[tw-launch] {text}\n")


def _late(
    wait: Callable[[TaskProcess, float], bool],
    tasks: Sequence[TaskProcess],
    *,
    within_s: float,
) -> list[TaskProcess]:
    """Waits for tasks with one deadline for all; returns those that missed it."""
    end = time.monotonic() + within_s
    return [task for task in tasks if not wait(task, max(0.0, end - time.monotonic()))]


def say(stream: TextIO | None, text: str) -> None:
    """Writes what can be written, to a stream that may be closed or not Unicode.

    Where nobody reads any more, as after ``| head``, the text is lost: a task whose
    output is not taken would wait forever.
    """
    if stream is None:  # Python was started without it.
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
    except (OSError, ValueError):
        pass


def _discard(stream: TextIO) -> None:
    """Sends a stream to nowhere, or Python would fail on its rest as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)

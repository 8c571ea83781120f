"""Watches the tasks of a launch: restarts, failure of all, orderly end, signals."""

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from tw_syncrep.launch._task_process import TaskProcess, say

_LOOK_EVERY_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Launcher:
    """Runs tasks until the run is over.

    Attributes:
      tasks: not started yet.
      max_restarts: how often a task is started again after a failure.
      grace_s: seconds between asking a task to end and killing it.
    """

    def __init__(
        self, tasks: Sequence[TaskProcess], *, max_restarts: int, grace_s: float
    ) -> None:
        """Keeps the arguments."""
        self.tasks = list(tasks)
        self.max_restarts = max_restarts
        self.grace_s = grace_s
        self._signal: int | None = None
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
                for task in self.tasks:
                    task.send(self._signal)
                return 128 + self._signal
            for task in self.tasks:
                if task.poll() and not self._restart(task):
                    return task.status or 1
            deciding = [task for task in self.tasks if task.plan.decides]
            if all(task.poll() == 0 for task in deciding):
                return 0
            self._woken.wait(_LOOK_EVERY_S)

    def _restart(self, task: TaskProcess) -> bool:
        if task.starts > self.max_restarts:
            self._say(
                f"{task.plan.name} failed with status {task.status} after "
                f"{task.starts} start(s); ending all tasks"
            )
            return False
        self._say(
            f"{task.plan.name} failed with status {task.status}; restart "
            f"{task.starts} of {self.max_restarts}"
        )
        task.start()
        return True

    def _end_all(self) -> None:
        running = [task for task in self.tasks if task.poll() is None]
        for task in running:
            task.send(signal.SIGTERM if self._signal is None else self._signal)
        late = [task for task in running if not task.wait(self.grace_s)]
        for task in late:
            task.send(signal.SIGKILL)
        for task in self.tasks:
            task.wait(self.grace_s)

    def _say(self, text: str) -> None:
        say(sys.stderr, f"[tw-launch] {text}\n")

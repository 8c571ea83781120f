"""A task's process: started, its output prefixed, ended with all its children."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, TextIO

from tw_syncrep.launch._task_plan import TaskPlan

_PR_SET_PDEATHSIG = 1


class TaskProcess:
    """One task, which may be started several times.

    Attributes:
      plan: which task.
      starts: how many times it was started.
      status: how it ended, as a shell tells it; None while it runs.
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
            env={**os.environ, "TF_CONFIG": self.plan.tf_config},
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
                # As a shell tells a signal.
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
        for reader in self._readers:
            reader.join(1.0)
        return True

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


def say(stream: TextIO | None, text: str) -> None:
    """Writes what can be written, to a stream that may be closed or not Unicode.

    Where nobody reads any more, as after ``| head``, what is said is lost: a task
    whose output is not taken would wait for ever.
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

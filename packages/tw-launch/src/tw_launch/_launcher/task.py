"""A task's process, which ends with the launcher; its children end with it."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tw_launch._launcher.messages import Ended
from tw_launch._launcher.output import TaskOutput
from tw_launch._launcher.plan import TaskPlan

_PR_SET_PDEATHSIG = 1
_NOT_RUN = 127  # as a shell reports it
_LAST_LINES_S = 0.5
_POLL_S = 1.0


# Reads process group numbers, "+N" when one begins and "-N" when one ends, and
# kills those that are left when its input ends.
_KEEPER = """
import os, signal, sys
groups = set()
for line in sys.stdin.buffer:
    (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Keeper:
    """A process that kills the children of tasks if the launcher is killed.

    The kernel ends a task's own process with the launcher, but not its children.
    """

    def __init__(self) -> None:
        """Starts it in its own session: signals to the launcher do not reach it."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def note(self, group: int, *, has_begun: bool) -> None:
        """Reports that a process group has begun or is about to end."""
        line = b"%c%d\n" % (b"+" if has_begun else b"-", group)
        with contextlib.suppress(OSError):  # It was killed; the run goes on without it.
            os.write(self._process.stdin.fileno(), line)  # type: ignore[union-attr]

    def close(self) -> None:
        """Ends the keeper."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


class Ends:
    """Notices the ends of child processes, in the order in which they ended.

    The kernel queues them in that order, even if this process had no processor at the
    time. (Linux before 5.3 has no process descriptors: there it is the order in which
    this process noticed them.)
    """

    def __init__(self) -> None:
        """Watches nothing yet."""
        self._epoll = select.epoll()
        self._watched: dict[int, Callable[[], None]] = {}
        self._is_closed = False
        threading.Thread(target=self._read, daemon=True).start()

    def watch(self, pid: int, on_end: Callable[[], None]) -> None:
        """Calls ``on_end`` once a child has ended; it has not been waited for yet."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:

            def wait() -> None:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                on_end()

            threading.Thread(target=wait, daemon=True).start()
            return
        self._watched[descriptor] = on_end
        self._epoll.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        """Stops watching."""
        self._is_closed = True

    def _read(self) -> None:
        with self._epoll:
            while not self._is_closed:
                for descriptor, _ in self._epoll.poll(_POLL_S):
                    on_end = self._watched.pop(descriptor)
                    self._epoll.unregister(descriptor)
                    os.close(descriptor)
                    on_end()


class TaskProcess:
    """One start of a task."""

    def __init__(
        self,
        plan: TaskPlan,
        command: Sequence[str],
        *,
        log: Path | None,
        ends: "Ends",
        keeper: Keeper,
        on_end: Callable[["TaskProcess"], None],
    ) -> None:
        """Starts the task, from the main thread, whose end would end the task.

        ``on_end`` is called in a thread of ``ends`` when the task has ended.
        """
        self.plan = plan
        self.log = log
        self.has_ended = threading.Event()
        self._code: int | None = None
        self._fault = ""
        self._output: TaskOutput | None = None
        self._keeper = keeper
        self._signalling = threading.Lock()
        try:
            self._process = _start(command, plan, keeper)
        except OSError as error:
            self._code, self._fault = _NOT_RUN, f"tw-launch: {command[0]}: {error}"
            self.has_ended.set()
            on_end(self)
            return
        pipes = self._process.stdout, self._process.stderr
        self._output = TaskOutput(plan.name, *pipes, log)
        ends.watch(self._process.pid, lambda: self._end(on_end))

    def send(self, number: int) -> None:
        """Sends a signal to the task and its children, if it runs."""
        with self._signalling:
            if self._code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)

    def wait_for_output(self, timeout_s: float) -> None:
        """Waits until all output is passed on."""
        if self._output is not None:
            self._output.wait(timeout_s)

    def report(self) -> Ended:
        """Reports how it ended, with its last lines if it failed."""
        code = self._code or 0
        status = code if code >= 0 else 128 - code  # As a shell reports it.
        killer = _signal_name(-code) if code < 0 else ""
        lines: tuple[str, ...] = (self._fault,) if self._fault else ()
        if status and self._output is not None:
            self.wait_for_output(_LAST_LINES_S)
            lines = self._output.last_lines
        log = "" if self.log is None else str(self.log.absolute())
        return Ended(self.plan.name, status, killer, lines, log)

    def _end(self, on_end: Callable[["TaskProcess"], None]) -> None:
        with self._signalling:
            # Until it is waited for, no other group can have its number.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._keeper.note(self._process.pid, has_begun=False)
            self._code = self._process.wait()
        self.has_ended.set()
        on_end(self)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _start(
    command: Sequence[str], plan: TaskPlan, keeper: Keeper
) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)
    launcher = os.getpid()

    def end_with_launcher() -> None:
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # The launcher ended before this line.
            os._exit(1)

    process = subprocess.Popen(
        command,
        env={**os.environ, **plan.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=end_with_launcher,
    )
    keeper.note(process.pid, has_begun=True)
    return process

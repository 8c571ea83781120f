"""Processes that tests, soaks and benchmarks start, talk to, wait for and end.

A ``Program`` is a command whose output can be read while it runs, a ``Peer`` a function
in a process of its own, with a pipe to it. Both end with the process that starts them,
also where that is killed. Every wait has a deadline.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
IN_BACKGROUND = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
"""Begins a command that runs as in the background of a script: SIGINT is ignored."""
TAG = "TOWERS_TEST"
"""A variable of the environment by whose value a test finds what it has started."""
_PR_SET_PDEATHSIG = 1


class Program(subprocess.Popen[bytes]):
    """A command in a session of its own, and what it has printed so far."""

    def __init__(
        self,
        command: Sequence[object],
        *,
        deadline_s: float = DEADLINE_S,
        log: Path | None = None,
        is_apart: bool = False,
        **options: Any,
    ) -> None:
        """Starts it; ``log`` gets its output, of which errors may be kept apart."""
        self.name = log.name if log is not None else str(command[0])
        self._deadline_s, self._told = deadline_s, 0
        self._out = _open(log)
        self._err = _open() if is_apart else self._out
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._out}
        streams |= {"stderr": self._err, "preexec_fn": _begin}
        self.words = [str(word) for word in command]
        super().__init__(self.words, start_new_session=True, **{**streams, **options})

    @property
    def out(self) -> str:
        return _read(self._out).decode(errors="replace")

    @property
    def err(self) -> str:
        return _read(self._err).decode(errors="replace")

    def new_lines(self) -> list[str]:
        """Returns the whole lines that it has printed since the last call."""
        new = _read(self._out, self._told)
        lines, _, _ = new.rpartition(b"\n")
        self._told += len(lines) + 1 if lines or new.startswith(b"\n") else 0
        return lines.decode(errors="replace").split("\n") if lines else []

    def wait_for(self, pattern: str, within_s: float | None = None) -> "re.Match[str]":
        """Waits until it has printed a pattern; returns the match."""
        within_s = self._deadline_s if within_s is None else within_s
        until = time.monotonic() + within_s
        while True:
            has_ended = self.poll() is not None
            printed = self.out if self._err is self._out else self.out + self.err
            if found := re.search(pattern, printed):
                return found
            tail = " | ".join(printed.splitlines()[-4:])
            assert not has_ended, f"{self.name} has ended: {tail}"
            late = f"{self.name}: no {pattern!r} within {within_s:g} s"
            assert time.monotonic() < until, f"{late}: {tail}"
            time.sleep(0.05)

    def finish(self, within_s: float | None = None) -> int:
        """Waits for its end, or ends it; returns its status, negative if killed."""
        try:
            return self.wait(self._deadline_s if within_s is None else within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return int(self.returncode)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kills it, with all of its session that runs, and waits for its end."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait(DEADLINE_S)

    def __exit__(self, *error: object) -> None:
        self.kill()


def succeed(command: Sequence[object], *, deadline_s: float, **options: Any) -> str:
    """Runs a command to a good end, or ends this process; returns what it prints."""
    program = Program(command, **options)
    if status := program.finish(deadline_s):
        sys.exit(f"{' '.join(program.words)} ended with {status}:\n{program.out}")
    return program.out


class Peer:
    """A process that runs a function, whose first argument is the pipe to it."""

    def __init__(
        self, context: Any, name: str, run: Callable[..., Any], *arguments: Any
    ) -> None:
        """Starts it, by a context of ``multiprocessing``."""
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_run, args=(run, theirs, *arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    def say(self, *message: Any) -> None:
        self.pipe.send(message)

    def hear(self, within_s: float = DEADLINE_S) -> Any:
        if not self.pipe.poll(within_s):
            raise TimeoutError(f"{self.name} said nothing for {within_s} s")
        return self.pipe.recv()

    def send(self, number: int) -> None:
        """Signals it."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():  # Also where it is stopped.
            self.process.kill()
        self.process.join(10)
        assert not self.process.is_alive()


def make_template() -> Any:
    """Returns a context whose processes are forked from one with TensorFlow in it.

    There is one such process, whichever tests of a run ask for it first.
    """
    context = multiprocessing.get_context("forkserver")
    programs = ["harness.task_programs", "harness.rank_programs"]
    context.set_forkserver_preload(["tensorflow", "keras", *programs])
    return context


def wait_until(is_so: Callable[[], Any], within_s: float = DEADLINE_S) -> Any:
    """Waits until a function returns what is true, and returns it."""
    until = time.monotonic() + within_s
    while not (value := is_so()):
        assert time.monotonic() < until, f"{is_so} did not come true"
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; one that nobody has asked how it ended does not.

    It need not be a child of this process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def tagged(tag: str) -> list[int]:
    """Lists the processes whose environment holds the tag, which children inherit."""
    wanted, found = f"{TAG}={tag}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # It has ended, or is another user's.
    return found


def _begin() -> None:
    """In a new process: it ends with its parent, and heeds signals as by default."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _run(run: Callable[..., Any], pipe: Any, *arguments: Any) -> None:
    """In a peer's process."""
    _begin()
    faulthandler.enable(2)  # A crash inside TensorFlow shows where.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    # The process from which this one was forked ends with the test, once none of its
    # children holds the pipe to it.
    if (pipe_of_server := forkserver._forkserver._forkserver_alive_fd) is not None:
        os.close(pipe_of_server)
    run(pipe, *arguments)


def _open(path: Path | None = None) -> Any:
    return tempfile.TemporaryFile() if path is None else path.open("w+b")


def _read(file: Any, start: int = 0) -> bytes:
    """Reads the rest of a file, and leaves its position to those who write."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size - start, start)

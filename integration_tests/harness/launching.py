"""Programs that tests start, alone or in a cluster, and that end whatever happens.

A fresh Python takes seconds of a processor to import TensorFlow. Where a test is about
what a program does and not about how it comes to be, it is forked from a template that
has TensorFlow in it, and so is each task that it starts with tw-launch. Of a process
that is to be watched as an ordinary one, ``python -m harness.launching`` forks them.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.processes import Program, make_template

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)  # a launcher handles them
HERE = str(Path(__file__).parents[1])
VARIABLES = {"TF_CPP_MIN_LOG_LEVEL": "2"}


def run_to_its_end(
    command: Sequence[str], *, deadline_s: float, cwd: Path | None = None
) -> tuple[int, str]:
    """Runs a command, which is killed with all that it started at the deadline.

    Returns its status, negative if killed, and what was said.
    """
    program = Program(command, cwd=cwd, env={**os.environ, **VARIABLES})
    return program.finish(deadline_s), program.out


def run_forked(
    command: Sequence[str], *, deadline_s: float, cwd: Path | None = None
) -> tuple[int, str]:
    """As ``run_to_its_end``, for ``[sys.executable, FILE or "-m", MODULE, ...]``.

    What reads the environment while TensorFlow is imported sees the template's, and
    all processes hash alike.
    """
    with tempfile.NamedTemporaryFile() as said:
        own = (list(command), cwd or Path.cwd(), said.name)
        process = make_template().Process(target=_run, args=own)
        process.start()
        try:
            process.join(deadline_s)
        finally:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # Where it leads no group yet.
                process.join()
        output = said.read().decode(errors="replace")
    return process.exitcode, output


def _run(command: list[str], cwd: Path, said: str) -> NoReturn:
    """In a process of the template: becomes the command."""
    os.setsid()
    os.chdir(cwd)
    output = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.environ.update(VARIABLES)
    if command[1:3] == ["-m", "tw_launch"]:
        _fork_tasks()
    _become(command[1:], output, output)


def _fork_tasks() -> None:
    """Has tw-launch fork its tasks from the process that it runs in."""
    from tw_launch import main  # noqa: F401 - its modules name the class replaced

    subprocess.Popen = _fork_or_exec  # type: ignore[assignment, misc]


def main() -> NoReturn:
    """Becomes tw-launch with the arguments given; its tasks begin with TensorFlow."""
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    _fork_tasks()
    _become(["-m", "tw_launch", *sys.argv[1:]], 1, 2)


def _become(words: list[str], stdout: int, stderr: int) -> NoReturn:
    """Runs a program in this process, as ``python WORDS`` would, and ends it."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # A thread of the process from which it was forked may hold the lock of the old.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    words = words[words[0] == "-u" :]  # Each line is written when it ends, anyway.
    import numpy as np  # Not at the top: ``pieces`` has the standard library alone.

    np.random.seed()  # Else it draws what all others draw.
    if HERE not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        sys.path[:] = [path for path in sys.path if path != HERE]
    # The template has read its own when it began; a launcher may have added to it.
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in added if path and path not in sys.path]
    status = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent.resolve()))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error  # As an interpreter notes it for what runs at its end.
        status = 1
    # Ends as an interpreter does: threads, exit functions, modules, C++.
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError


def _fork_or_exec(command: Sequence[str], **options: Any) -> Any:
    """Stands for ``subprocess.Popen``: forks where this Python is to be a task."""
    forks = command[0] == sys.executable and "preexec_fn" in options
    return _Forked(command, **options) if forks else _Popen(command, **options)


_Popen = subprocess.Popen


class _Forked:
    """A task that a launcher starts, as far as it uses ``subprocess.Popen``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        start_new_session: bool,
        preexec_fn: Any,
    ) -> None:
        assert stdin == subprocess.DEVNULL and start_new_session
        assert stdout == stderr == subprocess.PIPE
        pipes, leads = [os.pipe(), os.pipe()], os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            preexec_fn()
            os.write(leads[1], b".")
            os.environ.clear()
            os.environ.update(env)
            _become([*command[1:]], *(theirs for _, theirs in pipes))
        for _, theirs in (*pipes, leads):
            os.close(theirs)
        os.read(leads[0], 1)  # Its group is there.
        os.close(leads[0])
        self.stdout, self.stderr = (os.fdopen(ours, "rb") for ours, _ in pipes)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


if __name__ == "__main__":
    main()

"""tw-launch as tests start it, with small programs that do not import TensorFlow.

Whatever a test does, nothing outlives it for long: a task ends with its launcher, and
``finish`` and ``Launches`` kill launchers that are late.
"""

import contextlib
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

DEADLINE_S = 30
HEAD = """
import json, os, signal, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
job, index = config["task"]["type"], config["task"]["index"]
start = int(os.environ["TW_START"])
"""


def script(program: str) -> list[str]:
    """The command of tasks that run a program; it has HEAD's names."""
    return [sys.executable, "-c", HEAD + textwrap.dedent(program)]


def launch(program, *arguments, start=(), **settings):
    """Starts tw-launch, by the words of ``start``, with a program as its tasks."""
    command = [*start, sys.executable, "-m", "tw_launch", *arguments, "--"]
    return subprocess.Popen(
        command + script(program),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def finish(process):
    """Waits for a launcher's end; returns its status and both outputs."""
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    """Waits until a function returns what is true, and returns it."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return value


class Launches:
    """Launchers of several machines, each with its output in files.

    Attributes:
      coordinator: where node 0 is to listen.
      folder: where the output is.
    """

    def __init__(self, folder: Path, coordinator: str) -> None:
        self.coordinator = coordinator
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, node, program, *arguments, nnodes=2, launcher=None, **settings):
        """Starts the launcher of a machine; node n has the address 127.0.0.<n + 1>."""
        number = len(self._started)
        launcher = launcher or [sys.executable, "-m", "tw_launch"]
        place = ("--nnodes", nnodes, "--node-rank", node)
        meeting = ("--coordinator", self.coordinator, "--ps", "0", "--workers", "1")
        address = ("--address", f"127.0.0.{node + 1}")
        words = map(str, (*place, *meeting, *address, *arguments))
        # What runs the tests under nohup has it ignored.
        settings.setdefault(
            "preexec_fn", lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
        )
        with contextlib.ExitStack() as stack:
            out, err = (
                stack.enter_context((self.folder / f"{number}.{name}").open("wb"))
                for name in ("out", "err")
            )
            process = subprocess.Popen(
                [*launcher, *words, "--", *script(program)],
                **{"stdout": out, "stderr": err, **settings},
            )
        self._started.append(process)
        return process

    def out(self, process) -> str:
        return self._text(process, "out")

    def err(self, process) -> str:
        return self._text(process, "err")

    def hear(self, process, pattern):
        """Waits for a line of either output, and returns its match."""
        return wait_until(
            lambda: re.search(pattern, self.out(process) + self.err(process))
        )

    def finish(self, *processes) -> list[int]:
        """Waits for the ends of launchers, by default all; returns their statuses."""
        return [p.wait(DEADLINE_S) for p in processes or self._started]

    def kill(self) -> None:
        for process in self._started:
            # A stopped one is killed as well.
            process.kill()
            process.wait(DEADLINE_S)

    def _text(self, process, name):
        number = self._started.index(process)
        return (self.folder / f"{number}.{name}").read_text()

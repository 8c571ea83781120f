"""tw-launch as tests start it, with small programs that do not import TensorFlow.

Whatever a test does, nothing outlives it for long: a task ends with its launcher, and
``finish`` and ``Launches`` kill launchers that are late.
"""

import sys
import textwrap

from harness.processes import Program

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
    return Program([*command, *script(program)], is_apart=True, **settings)


def finish(process):
    """Waits for a launcher's end; returns its status and both outputs."""
    return process.finish(), process.out, process.err


class Launches:
    """Launchers of several machines."""

    def __init__(self, coordinator: str) -> None:
        self.coordinator = coordinator  # where node 0 is to listen
        self._started: list[Program] = []

    def start(self, node, program, *arguments, nnodes=2, launcher=None, **settings):
        """Starts the launcher of a machine; node n has the address 127.0.0.<n + 1>."""
        launcher = launcher or [sys.executable, "-m", "tw_launch"]
        place = ("--nnodes", nnodes, "--node-rank", node)
        meeting = ("--coordinator", self.coordinator, "--ps", "0", "--workers", "1")
        address = ("--address", f"127.0.0.{node + 1}")
        words = (*launcher, *place, *meeting, *address, *arguments)
        process = Program([*words, "--", *script(program)], is_apart=True, **settings)
        self._started.append(process)
        return process

    def finish(self, *processes) -> list[int]:
        """Waits for the ends of launchers, by default all; returns their statuses."""
        return [process.finish() for process in processes or self._started]

    def kill(self) -> None:
        for process in self._started:
            process.kill()

"""A program that is forked from the template is as one that is started afresh."""

import signal
import sys

import pytest
from harness.launching import run_forked, run_to_its_end

pytestmark = pytest.mark.slow

PROGRAM = """
import atexit, os, signal, sys, threading, time
import beside
atexit.register(print, "at exit")
threading.Timer(0.2, print, ["a thread"]).start()
print(beside.VALUE, __name__, sys.argv, os.getcwd(), flush=True)
print("an error", file=sys.stderr)
"""
LAUNCH = [sys.executable, "-m", "tw_launch", "--ps", "0", "--workers", "2", "--"]


@pytest.fixture
def started(tmp_path):
    """Returns what a program comes to that ends in some way, started in some way."""

    def start(run, end, *, launch=(), deadline_s=60):
        (tmp_path / "beside.py").write_text("VALUE = 5")
        (tmp_path / "program.py").write_text(PROGRAM + end)
        command = [*launch, sys.executable, "program.py", "--option"]
        return run(command, deadline_s=deadline_s, cwd=tmp_path)

    return start


@pytest.mark.parametrize(
    "end",
    [
        *("", "sys.exit(3)", "sys.exit('a sentence')", "raise ValueError('lost')"),
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_status_and_lines_are_those_of_a_fresh_python(started, end):
    (wanted, fresh), (status, said) = (
        started(run, end) for run in (run_to_its_end, run_forked)
    )
    shown = [line for line in fresh.splitlines() if not line.startswith("  File ")]
    assert status == wanted
    assert set(shown) <= set(said.splitlines()), said
    assert ("at exit" in said) == ("at exit" in fresh)


def test_tasks_of_a_launch_are_forked_and_killed_at_its_deadline(started):
    lines = [f"[worker {n}] 5 __main__ ['program.py', '--option']" for n in (0, 1)]
    status, said = started(run_forked, "", launch=LAUNCH)
    assert status == 0 and all(line in said for line in lines), said
    for deadline_s in (15, 60):  # A slow machine gets more.
        status, said = started(
            run_forked, "time.sleep(300)", launch=LAUNCH, deadline_s=deadline_s
        )
        assert status == -signal.SIGKILL, said
        if all(line in said for line in lines):
            return
    pytest.fail(said)

"""A program that is forked from the template is as one that is started afresh."""

import signal
import sys

import pytest
from launching import run_forked, run_to_its_end

PROGRAM = """
import atexit, os, signal, sys, threading, time
import beside
atexit.register(print, "at exit")
threading.Timer(0.2, print, ["a thread"]).start()
print(beside.VALUE, __name__, sys.argv, os.getcwd(), flush=True)
print("an error", file=sys.stderr)
"""
ENDS = {
    "end": "",
    "status": "sys.exit(3)",
    "sentence": "sys.exit('a sentence')",
    "none": "sys.exit(None)",
    "signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "raise": "raise ValueError('lost')",
}
LAUNCH = [sys.executable, "-m", "tw_launch", "--ps", "0", "--workers", "2"]


@pytest.fixture
def started(tmp_path):
    """Returns what a program comes to that ends in some way, started in some way."""

    def start(run, end, *, launch=(), deadline_s=60):
        (tmp_path / "beside.py").write_text("VALUE = 5")
        (tmp_path / "program.py").write_text(PROGRAM + end)
        command = [*launch, sys.executable, "program.py", "--option"]
        return run(command, deadline_s=deadline_s, cwd=tmp_path)

    return start


def shown(said):
    """The program's lines, without the places in a traceback."""
    return {line for line in said.splitlines() if not line.startswith("  File ")}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_status_and_lines_are_those_of_a_fresh_python(started, end):
    wanted, wanted_lines = started(run_to_its_end, end)
    status, lines = started(run_forked, end)
    assert status == wanted
    assert shown(wanted_lines) <= shown(lines), lines
    assert ("at exit" in lines) == ("at exit" in wanted_lines)


@pytest.mark.parametrize("end", ["", ENDS["status"], ENDS["signal"]])
def test_tasks_of_a_launch_too(started, end):
    wanted, _ = started(run_to_its_end, end, launch=[*LAUNCH, "--"])
    status, said = started(run_forked, end, launch=[*LAUNCH, "--"])
    assert status == wanted, said
    line = "5 __main__ ['program.py', '--option']"
    told = [f"[{task}] {line}" in said for task in ("worker 0", "worker 1")]
    # Where one fails at once, the launcher may end the other before it says anything.
    assert any(told) if end else all(told), said


@pytest.mark.parametrize("launch", [[], [*LAUNCH, "--"]], ids=["alone", "launched"])
def test_it_is_killed_at_its_deadline(started, launch):
    end = "time.sleep(60)"
    status, said = started(run_forked, end, launch=launch, deadline_s=4)
    assert status == -signal.SIGKILL
    assert "5 __main__" in said

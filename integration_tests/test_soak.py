"""The soak's bookkeeping, its short form, and Ctrl-C."""

import os
import signal
import sys
from pathlib import Path

import pytest
from harness.processes import TAG, Program, tagged, wait_until
from lab.soak.course import END_S, RECOVER_S, START_S, VICTIMS
from lab.soak.ledger import Kill, Ledger
from lab.soak.trend import Sample, report

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
WORKERS = ["worker 0", "worker 1"]
MIB = 1 << 20
SHORT_S, KILL_EVERY_S = 6.0, 2.0  # and on, until each victim was killed
CLEAN_UP_S = 75.0  # half a minute for each of the two programs, and some
# Start, a kill and a recovery a victim, and the end of both programs.
LONGEST_S = START_S + len(VICTIMS) * (KILL_EVERY_S + RECOVER_S) + 2 * END_S + CLEAN_UP_S


def told(ledger, task, **facts):
    text = ", ".join(f'"{key}": {value}' for key, value in facts.items())
    event = "step" if "step" in facts else "start"
    assert ledger.read(f'[{task}] soak {{"event": "{event}", {text}}}')


def test_a_kill_is_over_when_the_task_is_back_and_every_worker_went_on_since():
    ledger = Ledger()
    for worker in WORKERS:
        told(ledger, worker, pid=1)
        told(ledger, worker, step=10)
    kill = Kill("worker 1", 5.0, starts=1)
    told(ledger, "worker 0", step=11)  # before the task was back
    assert not kill.look(ledger, WORKERS, 6.0)
    told(ledger, "worker 1", pid=2)
    assert not kill.look(ledger, WORKERS, 7.0)
    told(ledger, "worker 0", step=8)  # from a checkpoint: not further
    told(ledger, "worker 1", step=8)
    assert not kill.look(ledger, WORKERS, 8.0)
    told(ledger, "worker 0", step=9)
    assert not kill.look(ledger, WORKERS, 9.0)
    told(ledger, "worker 1", step=9)
    assert kill.look(ledger, WORKERS, 10.0)
    assert kill.recovered_s == 5.0


@pytest.mark.parametrize("leaks", ["rss", "descriptors", ""])
def test_a_leak_of_memory_or_descriptors_is_a_fault_that_tells_both(leaks):
    held = [
        Sample(
            float(at),
            (400 + (at if leaks == "rss" else 500 * (at == 50))) * MIB,
            30 + (at if leaks == "descriptors" else at % 2),
        )
        for at in range(60)
    ]
    line, faults = report("towers", held, warm_up_s=10)
    assert faults == ([f"grew: {line}"] if leaks else [])
    line, faults = report("x", held[:3], warm_up_s=0)
    assert (line, faults) == ("x: 3 samples, too short to tell", [])


def start(*arguments):
    return Program([sys.executable, "-u", "-m", "lab.soak.run", *arguments], cwd=HERE)


@pytest.mark.timeout(LONGEST_S + 30)
@pytest.mark.parametrize("form", [[], ["--processes"]], ids=["servers", "processes"])
def test_the_short_form_loses_nothing(form):
    short = ("--minutes", str(SHORT_S / 60), "--kill-every", str(KILL_EVERY_S))
    process = start("--light", *short, *form)
    status, output = process.finish(LONGEST_S), process.out
    assert status == 0, output
    assert output.splitlines()[-1] == "0 faults"
    assert output.count(" killed ") == 3  # a line a victim
    assert " killed 0 times" not in output
    assert tagged(str(process.pid)) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", [[], ["--processes"]], ids=["servers", "processes"])
@pytest.mark.parametrize("when", ["as all start", "as all train"])
def test_ctrl_c_ends_it_with_a_summary_and_leaves_no_process(tmp_path, when, form):
    log = tmp_path / "log"
    light = ["--light"] if when == "as all train" else []
    process = start("--minutes", "5", "--log", str(log), *light, *form)
    count = 4 if form else 6
    with process:
        wait_until(lambda: len(tagged(str(process.pid))) >= count, 100)
        if when == "as all train":
            trains = '[worker 2] soak {"event": "step"'
            wait_until(lambda: log.exists() and trains in log.read_text(), 100)
        process.send_signal(signal.SIGINT)
        status, output = process.finish(CLEAN_UP_S), process.out
    assert status == 130, output
    assert output.splitlines()[-1] == "interrupted"
    assert "FAULT" not in output
    assert tagged(str(process.pid)) == []
    assert TAG not in os.environ

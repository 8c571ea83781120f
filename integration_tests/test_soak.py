"""The soak's bookkeeping, its short form, and Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import TAG, Program, tagged, wait_until
from soak.course import END_S, RECOVER_S, START_S, VICTIMS, GroupSoak, Soak
from soak.ledger import Kill, Ledger
from soak.trend import Bounds, Sample, measure, report, sample

HERE = Path(__file__).parent
WORKERS = ["worker 0", "worker 1"]
MIB = 1 << 20
SHORT_S, KILL_EVERY_S = 20.0, 3.0
CLEAN_UP_S = 75.0  # half a minute for each of the two programs, and some
# Start, a kill and a recovery a victim, and the end of both programs.
LONGEST_S = START_S + len(VICTIMS) * (KILL_EVERY_S + RECOVER_S) + 2 * END_S + CLEAN_UP_S


def told(ledger, task, **facts):
    text = ", ".join(f'"{key}": {value}' for key, value in facts.items())
    event = "step" if "step" in facts else "start"
    assert ledger.read(f'[{task}] soak {{"event": "{event}", {text}}}')


def test_lines_of_other_kinds_are_not_the_ledgers():
    ledger = Ledger()
    assert not ledger.read("[tw-launch] ps 0 failed with status 137; restart 1 of 9")
    assert not ledger.read("[worker 0] INFO:tensorflow:Saving checkpoints")
    assert (ledger.pids, ledger.steps, ledger.ends) == ({}, {}, {})


def test_a_fault_that_a_task_tells_is_kept_with_its_name():
    ledger = Ledger()
    ledger.read('[worker 1] soak {"event": "fault", "text": "step 3 after 5"}')
    assert ledger.faults == ["worker 1: step 3 after 5"]


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


def samples(rss, descriptors):
    return [Sample(float(at), rss(at), descriptors(at)) for at in range(60)]


def test_a_trend_compares_the_last_third_with_the_first_after_the_warm_up():
    trend = measure(
        range(60), [100 if at < 30 else at for at in range(60)], warm_up_s=30
    )
    assert trend.samples == 30
    assert (trend.level, trend.growth) == (34.5, 20.0)
    assert trend.per_minute == pytest.approx(60.0)


def test_a_short_time_tells_nothing():
    assert measure([1.0, 2.0, 15.0], [5, 5, 5], warm_up_s=0) is None
    assert measure([1.0, 90.0], [5, 5], warm_up_s=0) is None
    line, faults = report("x", samples(int, int)[:3], warm_up_s=0, bounds=Bounds())
    assert (line, faults) == ("x: 3 samples, too short to tell", [])


def test_what_stays_level_is_no_fault_whatever_single_samples_hold():
    level = samples(
        lambda at: (900 if at == 50 else 400 + at % 3) * MIB, lambda at: 30 + at % 2
    )
    line, faults = report("towers", level, warm_up_s=10, bounds=Bounds())
    assert faults == []
    assert line.startswith("towers: 401.0 MiB +0.0 MiB (+0.0 MiB/min, bound +24.0 MiB)")


@pytest.mark.parametrize("leaks", ["rss", "descriptors"])
def test_a_leak_of_memory_or_descriptors_is_a_fault_that_tells_both(leaks):
    rising = samples(
        lambda at: (400 + (at if leaks == "rss" else 0)) * MIB,
        lambda at: 30 + (at if leaks == "descriptors" else 0),
    )
    line, faults = report("towers", rising, warm_up_s=0, bounds=Bounds())
    assert faults == [f"grew: {line}"]


class Slow(Soak):
    """A soak in which every recovery takes as long as the run; nothing is started."""

    now_s = 0.0

    def _watch_until(self, until_s):
        self.now_s = max(self.now_s, until_s)

    def _kill(self, task):
        self._kills.append(Kill(task, self.now_s, starts=1))
        self.now_s += 120.0


def test_every_victim_is_killed_however_long_recoveries_take(tmp_path):
    soak = Slow(tmp_path, KILL_EVERY_S)
    soak.run(120.0)
    assert tuple(kill.task for kill in soak._kills) == VICTIMS


def test_every_rank_of_a_group_is_killed_in_its_turn(tmp_path):
    victims = GroupSoak(tmp_path, KILL_EVERY_S)._choose_victims()
    for _ in range(4):
        assert {next(victims) for _ in range(3)} == set(GroupSoak.victims)


def test_a_process_that_has_ended_is_no_sample():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert sample(process.pid, 1.0).rss_bytes > 0
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert sample(process.pid, 2.0) is None
    process.communicate()


def start(*arguments):
    return Program([sys.executable, "-u", "-m", "soak.run", *arguments], cwd=HERE)


@pytest.mark.full("processes")
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


@pytest.mark.full("as all start-servers", "as all train-processes")
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

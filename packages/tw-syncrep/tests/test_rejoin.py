"""Killed tasks rejoin, others leave in order, and no gradient is applied twice.

Each replica has a gradient of its own, so the parameters show whose were applied,
and how often.
"""

import numpy as np
import pytest
from harness.processes import wait_until

WEIGHTS = np.array([1.0, 2.0, 4.0])
FACTORS = [1.0, 3.0, 5.0]
BOTH, ALL, OUTER = 2.0, 3.0, 3.0
"""Mean factors of replicas 0 and 1, of all three, of replicas 0 and 2."""
OPTIONS = {"wait_timeout_s": 40, "start_timeout_s": 60}
SPEC = {"kind": "towers", "aggregate": 2, "total": 2, "options": OPTIONS}


def check_numbers(variables, means):
    """Gradient descent with rate 0.5 from ones, a step for each mean factor."""
    want = 1 - 0.5 * sum(means) * WEIGHTS
    np.testing.assert_array_equal(variables["model/w:0"], want)


def go_until(tasks, step, replica):
    tasks.workers[replica].say("until", {"factor": FACTORS[replica], "step": step})


def steps_until(tasks, step, who):
    for replica in who:
        go_until(tasks, step, replica)
    for replica in who:
        tasks.workers[replica].expect("done")


@pytest.mark.slow
def test_what_a_worker_pushed_before_it_died_counts_once(make_cluster):
    tasks = make_cluster()
    tasks.train(SPEC)
    tasks.step_together([{"factor": factor} for factor in FACTORS[:2]])
    tasks.workers[1].say("step", {"factor": FACTORS[1]})
    wait_until(lambda: tasks.workers[0].ask("status")[0].arrived == (1,))
    tasks.workers[1].kill()
    tasks.restart("worker", 1, "train", SPEC)
    before = tasks.workers[0].ask("status")[0].arrived_s[1]
    tasks.workers[1].say("step", {"factor": 100.0})
    wait_until(lambda: tasks.workers[0].ask("status")[0].arrived_s[1] < before)
    tasks.workers[0].ask("step", {"factor": FACTORS[0]})
    tasks.workers[1].expect("done")
    step, variables = tasks.workers[0].ask("read")
    assert step == 2
    check_numbers(variables, [BOTH] * 2)
    assert tasks.workers[0].ask("status")[0].dropped == 1


@pytest.mark.slow
def test_a_lost_and_restarted_backup_is_not_waited_for(make_cluster):
    spec = {**SPEC, "total": 3}
    tasks = make_cluster(workers=3)
    tasks.train(spec)
    steps_until(tasks, 2, [0, 1])
    tasks.workers[2].kill()
    steps_until(tasks, 4, [0, 1])
    tasks.restart("worker", 2, "train", spec)
    tasks.workers[1].kill()
    steps_until(tasks, 6, [0, 2])
    step, variables = tasks.workers[2].ask("read")
    assert step == 6
    check_numbers(variables, [BOTH] * 4 + [OUTER] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["chief", "ps"])
def test_a_restarted_task_goes_on_from_the_last_checkpoint(
    make_cluster, tmp_path, victim
):
    tasks = make_cluster()
    spec = {**SPEC, "checkpoint_dir": str(tmp_path)}
    tasks.train(spec)
    steps_until(tasks, 4, [0, 1])
    saved = max(int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("*.index"))
    assert saved >= 3
    for replica in (0, 1):
        go_until(tasks, saved + 20, replica)
    if victim == "chief":
        tasks.workers[0].kill()
        tasks.restart("worker", 0, "train", spec)
        step, variables = tasks.workers[0].ask("read")
        assert step >= saved
        go_until(tasks, saved + 20, 0)
    else:
        tasks.servers[0].kill()
        tasks.restart("ps", 0, "serve", {})
    assert [worker.expect("done") for worker in tasks.workers] == [False, False]
    lowest = [worker.ask("lowest_step") for worker in tasks.workers]
    assert min(lowest) >= saved
    step, variables = tasks.workers[1].ask("read")
    assert step >= saved + 20
    check_numbers(variables, [BOTH] * step)


@pytest.mark.slow
def test_others_go_on_without_a_replica_that_leaves_and_end_with_the_chief(
    make_cluster,
):
    tasks = make_cluster(workers=3)
    tasks.train({**SPEC, "aggregate": 3, "total": 3})
    first, second, third = tasks.workers
    steps_until(tasks, 2, [0, 1, 2])
    first.say("step", {"factor": 1.0})  # It waits when the second leaves.
    second.say("out_of_data")
    second.expect("closed")
    steps_until(tasks, 3, [2])
    assert first.expect("done") is False
    steps_until(tasks, 5, [0, 2])
    step, variables = first.ask("read")
    assert step == 5
    check_numbers(variables, [ALL] * 2 + [OUTER] * 3)
    status, line = third.ask("status")
    assert status.left == (1,)
    assert "left 1" in line
    third.say("step", {"factor": 2.0})
    first.say("end")
    first.expect("closed")
    assert third.expect("done") is True
    third.say("end")
    third.expect("closed")


@pytest.mark.slow
def test_all_end_when_a_replica_leaves_if_so_chosen(make_cluster):
    tasks = make_cluster()
    tasks.train({**SPEC, "options": {**OPTIONS, "when_replica_leaves": "end"}})
    steps_until(tasks, 1, [0, 1])
    tasks.workers[0].say("steps", {"factor": 2.0, "count": 10**9})
    tasks.workers[1].say("out_of_data")
    tasks.workers[1].expect("closed")
    assert tasks.workers[0].expect("done") == 1
    tasks.workers[0].say("end")
    tasks.workers[0].expect("closed")

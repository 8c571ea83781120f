"""Replicas leave in order, chiefs close, and neither is mistaken for the other."""

from test_rejoin import ALL, OPTIONS, OUTER, SPEC, check_numbers, steps_until


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

"""Replicas leave in order, chiefs close, and neither is mistaken for the other."""

from test_rejoin import ALL, OPTIONS, OUTER, SPEC, check_numbers, steps_until


def test_others_continue_with_fewer_when_a_replica_has_no_more_data(make_cluster):
    tasks = make_cluster(workers=3)
    tasks.train({**SPEC, "aggregate": 3, "total": 3})
    steps_until(tasks, 2, [0, 1, 2])
    tasks.workers[1].say("out_of_data")
    tasks.workers[1].expect("closed")
    steps_until(tasks, 5, [0, 2])
    step, variables = tasks.workers[0].ask("read")
    assert step == 5
    check_numbers(variables, [ALL] * 2 + [OUTER] * 3)
    status, line = tasks.workers[2].ask("status")
    assert status.left == (1,)
    assert "left 1" in line


def test_a_waiting_replica_goes_on_when_another_leaves(make_cluster):
    tasks = make_cluster()
    tasks.train(SPEC)
    steps_until(tasks, 1, [0, 1])
    tasks.workers[0].say("step", {"factor": 2.0})
    tasks.workers[1].say("out_of_data")
    tasks.workers[1].expect("closed")
    assert tasks.workers[0].expect("done") is False


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


def test_an_orderly_close_of_the_chief_stops_the_others_without_an_exception(
    make_cluster,
):
    tasks = make_cluster()
    tasks.train(SPEC)
    steps_until(tasks, 2, [0, 1])
    tasks.workers[1].say("step", {"factor": 2.0})
    tasks.workers[0].say("end")
    tasks.workers[0].expect("closed")
    assert tasks.workers[1].expect("done") is True
    tasks.workers[1].say("end")
    tasks.workers[1].expect("closed")

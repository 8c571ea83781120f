"""Lost tasks end the others' waits with an error of the right type and names.

How soon is measured by the trials of the session ``faults``.
"""

import pytest
from syncrep_faults import FAULTS, OPTIONS, RECOVERIES, SPEC, run_trial


@pytest.mark.parametrize("fault", FAULTS)
def test_survivors_raise_a_typed_error_that_names_whom_they_wait_for(
    make_cluster, fault
):
    tasks = make_cluster()
    reports = run_trial(tasks, fault)
    assert {report.error for report in reports} == {FAULTS[fault]}
    for report in reports:
        if fault == "worker killed":
            assert (report.facts["arrived"], report.facts["missing"]) == ((0,), (1,))
            assert report.facts["step"] >= 0
            assert report.facts["waited_s"] >= OPTIONS["wait_timeout_s"]
            assert report.facts["heard_s"][0] < report.facts["heard_s"][1]
            assert "Missing: 1 (heard" in report.message
            assert "Arrived: 0 (heard" in report.message
        elif fault == "chief killed":
            assert 0 in report.facts["missing"]
            assert "The chief is lost: replica 0 (heard" in report.message
        else:
            address = tasks.addresses["ps"][0]
            assert f"ps 0 ({address})" in report.message
    for task in tasks.all:
        task.kill()


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_what_went_before_is_neither_lost_nor_in_the_way(make_cluster, recovery):
    RECOVERIES[recovery](make_cluster())


def test_the_hook_alone_names_a_lost_worker_in_tensorflows_session(make_cluster):
    (report,) = run_trial(make_cluster(), "worker killed", bounded=False)
    assert report.error == "ReplicaTimeoutError"
    assert report.facts["missing"] == (1,)


@pytest.mark.parametrize(
    "fault, words", [("killed", "cannot be reached"), ("stopped", "does not answer")]
)
def test_creating_a_session_is_bounded(make_cluster, fault, words):
    tasks = make_cluster(workers=1)
    server = tasks.servers[0]
    worker = tasks.start("worker", 0, "train", {**SPEC, "aggregate": 1, "total": 1})
    worker.expect("built")
    server.stop() if fault == "stopped" else server.kill()
    worker.say("go")
    word, error, message, _ = worker.hear(20)
    assert (word, error) == ("raised", "ServerLostError")
    assert "creating the session has waited" in message
    assert f"ps 0 ({tasks.addresses['ps'][0]}) {words}" in message


def test_closing_a_session_with_a_stopped_parameter_server_is_bounded(make_cluster):
    tasks = make_cluster(workers=1)
    (worker,) = tasks.train({**SPEC, "aggregate": 1, "total": 1})
    worker.ask("step", {"factor": 1.0})
    tasks.servers[0].stop()
    worker.say("end")
    word, error, message, _ = worker.hear(20)
    assert (word, error) == ("raised", "ServerLostError")
    assert "closing the session has waited" in message


def test_a_replica_that_does_not_start_is_named(make_cluster):
    tasks = make_cluster()
    # It bounds the session's creation too.
    options = {**OPTIONS, "start_timeout_s": 15}
    tasks.workers = [tasks.start("worker", 0, "train", {**SPEC, "options": options})]
    (worker,) = tasks.workers
    worker.expect("built")
    worker.say("go")
    worker.expect("created")
    worker.say("step", {"factor": 1.0})
    word, error, message, facts = worker.hear(40)
    assert (word, error) == ("raised", "StartTimeoutError")
    assert facts["missing"] == (1,)
    assert facts["heard_s"][1] is None
    assert "Missing: 1 (never heard)" in message


def test_a_replica_without_a_chief_is_refused(make_cluster):
    tasks = make_cluster()
    options = {**OPTIONS, "start_timeout_s": 3}
    worker = tasks.start("worker", 1, "train", {**SPEC, "options": options})
    worker.expect("built")
    worker.say("go")
    word, error, message, _ = worker.hear(20)
    assert (word, error) == ("raised", "StartTimeoutError")
    assert "the chief has not initialized the variables" in message

"""Lost tasks end the others' waits with an error of the right type and names.

Of all the drills, as many as show each fault and each victim; ``nox -s faults`` runs
all of them, and again and again.
"""

import os
import signal

import pytest
from harness.task_faults import (
    DRILLS,
    OPTIONS,
    RAISED,
    SCENES,
    SPEC,
    Trial,
    is_linked,
    why_no_links,
    workers_of,
)
from syncrep_given import missing_in


def hear_error(worker, kind, within_s=20):
    """Returns the message of a worker's error, and what it says of it besides."""
    word, error, message, facts = worker.hear(within_s)
    assert (word, error) == ("raised", kind)
    return message, facts


@pytest.fixture
def try_out(make_cluster, processes, tmp_path):
    """Makes trials of drills; skips those with links where there can be none."""

    def make(name):
        if is_linked(name) and (reason := why_no_links(processes)):
            pytest.skip(f"links cannot be taken down here: {reason}")
        return Trial(make_cluster(linked=is_linked(name)), DRILLS[name], tmp_path)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "worker killed, retried",
        "chief paused, in time",
        "ps stopped, new run",
        "worker cut, new run",
    ],
)
def test_survivors_name_whom_they_wait_for_and_no_step_is_lost(try_out, name):
    trial = try_out(name)
    outcome = trial.run()
    assert not outcome.failure
    for report in trial.reports:
        if report.error == RAISED["worker"]:
            assert (report.facts["arrived"], report.facts["missing"]) == ((0,), (1,))
            assert report.facts["step"] >= 0
            assert report.facts["waited_s"] >= OPTIONS["wait_timeout_s"]
            assert report.facts["heard_s"][0] < report.facts["heard_s"][1]
            assert "Missing: 1 (heard" in report.message
            (told,) = missing_in(report.facts["report"])
            assert told.startswith("replica 1: is inside its step of round ")
            assert "  arrived   replica 0\n" in report.facts["report"]
            assert "replica 0: training op, call " in report.facts["report"]
            assert "Arrived: 0 (heard" in report.message
        elif report.error == RAISED["chief"]:
            assert 0 in report.facts["missing"]
            assert "The chief is lost: replica 0 (heard" in report.message
            assert missing_in(report.facts["report"])[0].startswith(
                "replica 0: is the chief, and does"
            )
        else:
            address = trial.tasks.addresses["ps"][0]
            assert f"ps 0 ({address})" in report.message
            (told,) = missing_in(report.facts["report"])
            assert told.startswith(f"ps 0: ({address}) ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene",
    ["workers killed while the server is paused", "chief killed between two steps"],
)
def test_what_went_before_is_neither_lost_nor_in_the_way(make_cluster, scene):
    SCENES[scene](make_cluster(workers=workers_of(scene)))


@pytest.mark.slow
def test_the_hook_alone_names_a_lost_worker_in_tensorflows_session(try_out):
    trial = try_out("worker killed, new run")
    trial.spec["bounded"] = False
    trial.begin()
    trial.harm()
    trial.hear_errors("raised")
    (report,) = trial.reports
    assert report.facts["missing"] == (1,)


@pytest.mark.slow
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
    message, _ = hear_error(worker, "ServerLostError")
    assert "creating the session has waited" in message
    assert f"ps 0 ({tasks.addresses['ps'][0]}) {words}" in message


# In the first call of its fetches TensorFlow registers the graph: nothing cancels that.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "with_addresses"),
    [
        ("end", True),
        ("in a call", True),
        ("in a call", False),
        ("in a step function", True),
        ("in a hook", True),
    ],
)
def test_a_call_to_a_stopped_server_is_bounded(make_cluster, call, with_addresses):
    tasks = make_cluster(workers=1)
    spec = {**SPEC, "aggregate": 1, "total": 1, "addresses": with_addresses}
    (worker,) = tasks.train(spec)
    worker.ask("step", {"factor": 1.0})
    tasks.servers[0].stop()
    worker.say(*(("end",) if call == "end" else ("ask", call)))
    message, _ = hear_error(worker, "ServerLostError")
    what = "closing the session" if call == "end" else "a step"
    assert f"{what} has waited" in message


@pytest.mark.slow
def test_a_server_that_is_back_is_not_lost_while_the_chief_stays_away(make_cluster):
    tasks = make_cluster()
    options = {"wait_timeout_s": 2.0, "start_timeout_s": 15}
    _, worker = tasks.train({**SPEC, "options": options})
    tasks.step_together([{"factor": 1.0}] * 2)
    worker.say("step", {"factor": 1.0})
    tasks.workers[0].kill()
    tasks.servers[0].kill()
    tasks.restart("ps", 0, "serve", {})
    message, _ = hear_error(worker, "SyncTimeoutError", 60)
    assert "of a server that restarted: start the chief." in message


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_step_that_waits_can_be_interrupted(make_cluster, is_stopped):
    tasks = make_cluster()
    options = {**OPTIONS, "wait_timeout_s": 600}
    worker, _ = tasks.train({**SPEC, "options": options})
    tasks.step_together([{"factor": 1.0}] * 2)
    worker.say("step", {"factor": 1.0})
    assert not worker.pipe.poll(0.5)  # It waits for the other's gradient.
    if is_stopped:
        tasks.servers[0].stop()
    os.kill(worker.process.pid, signal.SIGINT)
    hear_error(worker, "KeyboardInterrupt", 10)


def test_a_replica_without_a_chief_is_refused(make_cluster):
    tasks = make_cluster()
    options = {**OPTIONS, "start_timeout_s": 2}
    worker = tasks.start("worker", 1, "train", {**SPEC, "options": options})
    worker.expect("built")
    worker.say("go")
    message, _ = hear_error(worker, "StartTimeoutError")
    assert "the chief has not initialized the variables" in message

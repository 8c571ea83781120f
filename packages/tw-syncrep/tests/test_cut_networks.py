"""The network between tasks that all live is cut, parted or slow: who raises, and what.

Relays stand for the network; ``nox -s faults -- --drill hosts`` cuts that of hosts.
"""

import time

import pytest
from harness.ports import find_free_ports
from harness.task_faults import expect_exact
from harness.tasks import Tasks

WAIT_S = 3.0
GRACE_S = 57.0  # for a busy machine


@pytest.fixture
def make_tasks(processes):
    made = []

    def make(**options):
        made.append(Tasks(processes, **options))
        return made[-1]

    yield make
    for tasks in made:
        tasks.kill()


def begin(tasks, **options):
    """Has all replicas train a few steps, and go on without an end."""
    count = len(tasks.addresses["worker"])
    options = {"wait_timeout_s": WAIT_S, "start_timeout_s": 40, **options}
    spec = {"kind": "towers", "aggregate": count, "total": count, "options": options}
    tasks.serve()
    tasks.train(spec)
    tasks.step_until(5)
    for worker in tasks.workers:
        worker.say("until", {"factor": 1.0, "step": 10**6})
    time.sleep(0.2)
    return spec


def hear_error(worker, within_s=WAIT_S + GRACE_S):
    word, kind, message, facts = worker.hear(within_s)
    assert word == "raised"
    return kind, message, facts


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_making_a_session_anew_counts_against_the_bound_of_the_step(
    make_tasks, elastic
):
    tasks = make_tasks(workers=1)
    to_worker = tasks.relay("ps 0", "worker 0")
    begin(tasks, elastic=elastic)
    to_worker.refuse()
    kind, message, facts = hear_error(tasks.workers[0])
    if kind == "ServerLostError":  # The step was lost, and no session was made anew.
        assert "though all of them answer a probe" in message
    else:
        assert kind == "SyncTimeoutError"
        assert "has been losing and recreating its session" in message
        assert "though all parameter servers answer" in message
    assert f"cannot reach this task, worker 0, at {tasks.addresses['worker'][0]}" in (
        message
    )
    assert "an answer from the parameter servers to a step" in facts["report"]


@pytest.mark.slow
def test_workers_whose_servers_do_not_reach_each_other_all_say_so(make_tasks):
    tasks = make_tasks(ps=2, workers=2)
    parted = [tasks.relay("ps 0", "ps 1"), tasks.relay("ps 1", "ps 0")]
    begin(tasks)
    for relay in parted:
        relay.cut()
    one, other = tasks.addresses["ps"]
    for worker in tasks.workers:
        kind, message, facts = hear_error(worker)
        assert kind == "ServerLostError"
        pair = f"ps 0 ({one}) and ps 1 ({other})"
        assert f"answer this task, but cannot reach each other: {pair}." in message
        assert facts["servers"] == (f"{pair} cannot reach each other",)
        assert f"missing   {pair}: cannot reach each other" in facts["report"]


@pytest.mark.slow
def test_an_elastic_replica_that_is_cut_off_comes_back_by_itself(make_tasks):
    tasks = make_tasks(workers=2)
    relays = [tasks.relay("ps 0", "worker 1"), tasks.relay("worker 1", "ps 0")]
    options = {"wait_timeout_s": WAIT_S, "start_timeout_s": 40, "elastic": True}
    tasks.serve()
    tasks.train({"kind": "towers", "aggregate": 2, "total": 2, "options": options})
    tasks.step_until(5)
    stays, goes = tasks.workers
    goes.say("until", {"factor": 1.0, "step": 20})
    for relay in relays:
        relay.cut()
    began = time.monotonic()
    tasks.step_until(10, [0])
    assert stays.ask("status")[0].evicted == (1,)
    time.sleep(max(0.0, began + 2 * WAIT_S - time.monotonic()))
    for relay in relays:
        relay.heal()
    until = time.monotonic() + 60
    while stays.ask("status")[0].evicted:
        assert time.monotonic() < until
        time.sleep(0.5)  # On a busy machine, questions slow the others' answers.
    tasks.step_until(20, [0])
    assert not goes.expect("done")
    tasks.step_until(25)
    status, _ = stays.ask("status")
    assert (status.joined, status.evicted, status.evictions) == ((0, 1), (), 1)
    expect_exact(*goes.ask("read"))


@pytest.mark.slow
def test_a_task_that_servers_do_not_reach_says_so_at_its_start(make_tasks):
    tasks = make_tasks(workers=1)
    tasks.relay("ps 0", "worker 0").cut()
    tasks.serve()
    options = {"wait_timeout_s": WAIT_S, "start_timeout_s": WAIT_S}
    spec = {"kind": "towers", "aggregate": 1, "total": 1, "options": options}
    worker = tasks.start("worker", 0, "train", spec)
    worker.expect("built")
    worker.say("go")
    kind, message, _ = hear_error(worker)
    assert kind == "StartTimeoutError"
    own = f"this task, worker 0, at {tasks.addresses['worker'][0]}"
    assert f"Or the servers cannot reach {own}" in message
    assert "to another address can join only after the servers have been" in message


def port_of(address):
    return int(address.rpartition(":")[2])


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_of_two_living_processes_of_one_index_the_older_always_yields(
    make_tasks, elastic
):
    tasks = make_tasks(workers=2)
    to_chief = tasks.relay("ps 0", "worker 0")
    to_server = tasks.relay("worker 0", "ps 0")
    # Time enough for a successor to start.
    spec = begin(tasks, elastic=elastic, wait_timeout_s=30.0)
    older, other = tasks.workers
    to_server.cut()
    to_chief.cut()
    # The successor has the chief's name, which leads to it from now on.
    tasks.addresses["worker"][0] = f"localhost:{find_free_ports(1)[0]}"
    to_chief.lead_to(port_of(tasks.addresses["worker"][0]))
    to_chief.heal()
    tasks.forget(to_server)  # The successor reaches the server directly.
    newer = tasks.restart("worker", 0, "train", spec)
    assert newer.ask("sessions") == 1
    to_server.heal()
    kind, message, _ = hear_error(older, 30)
    to_server.end()
    assert kind == "ReplicaReplacedError"
    assert "another process has been started as replica 0 and has replaced" in message
    # The older one has ended no session of its successor's.
    assert newer.ask("sessions") == 1
    tasks.step_until(newer.ask("read")[0] + 10, [0])
    assert not other.pipe.poll(), other.hear()

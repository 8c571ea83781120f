"""Elastic runs: replicas are evicted and come back, and any of them can be the chief.

Every replica brings the same gradient, so that a step is exact whoever came for it.
"""

import threading

import numpy as np
import pytest
import tensorflow as tf
from harness.processes import wait_until
from harness.replica_threads import new_container, run_replicas
from harness.task_faults import expect_exact
from syncrep_given import ByHand, make, vector

from tw_syncrep import ReplicaReplacedError

WAIT_S = 4.0
OPTIONS = {
    "wait_timeout_s": WAIT_S,
    "start_timeout_s": 60,
    "elastic": True,
    "min_replicas": 2,
}
SPEC = {"kind": "towers", "aggregate": 3, "total": 3, "options": OPTIONS}
WEIGHTS = np.array([1.0, 2.0, 4.0])


def exact_step(tasks, replica):
    step, variables = tasks.workers[replica].ask("read")
    expect_exact(step, variables)
    return step


def status_of(tasks, replica):
    return tasks.workers[replica].ask("status")[0]


@pytest.mark.slow
def test_a_stopped_replica_is_evicted_and_comes_back(make_cluster):
    tasks = make_cluster(workers=3)
    tasks.train(SPEC)
    tasks.step_until(5, [0, 1, 2])
    tasks.workers[2].stop()
    tasks.step_until(10, [0, 1])
    status, line = tasks.workers[0].ask("status")
    assert (status.evicted, status.missing, status.evictions) == ((2,), (0, 1), 1)
    assert "evicted 2 (heard" in line
    tasks.workers[2].go_on()
    tasks.step_until(status.step + 5, [0, 1, 2])
    wait_until(lambda: status_of(tasks, 0).evicted == ())
    exact_step(tasks, 0)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["kill", "stop"])
def test_another_replica_goes_on_as_chief(make_cluster, harm):
    tasks = make_cluster(workers=3)
    tasks.train(SPEC)
    tasks.step_until(5, [0, 1, 2])
    old = tasks.workers[0]
    getattr(old, harm)()
    tasks.step_until(10, [1, 2])
    status = status_of(tasks, 1)
    assert status.chief in (1, 2)
    assert (status.evicted, status.cut_off) == ((0,), 0)
    assert exact_step(tasks, 1) == 10
    if harm == "kill":
        tasks.restart("worker", 0, "train", SPEC)
    else:
        old.go_on()
    tasks.step_until(15, [0, 1, 2])
    after = status_of(tasks, 0)
    # The office stays where it is.
    assert (after.chief, after.incarnation) == (status.chief, status.incarnation)
    assert (after.evicted, after.joined) == ((), (0, 1, 2))
    assert exact_step(tasks, 0) >= 15


@pytest.mark.slow
def test_the_acting_chief_writes_the_checkpoints(make_cluster, tmp_path):
    tasks = make_cluster(workers=3)
    tasks.train({**SPEC, "checkpoint_dir": str(tmp_path)})
    tasks.step_until(3, [0, 1, 2])
    tasks.workers[0].kill()
    tasks.step_until(8, [1, 2])
    assert 7 <= step_of_checkpoint(tmp_path) <= 8
    # The others end first: the last checkpoint is the acting chief's.
    acting = status_of(tasks, 1).chief
    tasks.workers[3 - acting].say("end")
    tasks.workers[3 - acting].expect("closed")
    tasks.step_until(10, [acting])
    tasks.workers[acting].say("end")
    tasks.workers[acting].expect("closed")
    assert step_of_checkpoint(tmp_path) == 10


def step_of_checkpoint(folder):
    reader = tf.train.load_checkpoint(str(folder))
    step = reader.get_tensor("global_step")
    want = 1 - 0.5 * step * WEIGHTS
    np.testing.assert_array_equal(reader.get_tensor("model/w"), want)
    return step


# Without processes.


def build(task, **options):
    grad = tf.fill([3], 2.0 * task.replica_index + 1)
    return make(task, lambda _: [(grad, vector())], aggregate=3, **options)


def opened():
    """Three replicas of an elastic run."""
    replicas = ByHand(3, lambda task: build(task, elastic=True))
    for replica, what in enumerate(("open", "join", "join")):
        replicas.do(what, replica)
    return replicas


@pytest.mark.slow
def test_an_older_process_does_not_get_its_number_back():
    replicas = opened()
    left_behind, life = replicas.do("draw", 1), replicas.do("draw", 1)
    replicas.do("join", 1, life=life)
    first = replicas.session(1)
    replicas.do("join", 1, life=left_behind)  # which comes late
    assert replicas.session(1) == -1
    replicas.do("join", 1, life=life)
    assert replicas.session(1) > first
    newer = replicas.do("draw", 1)  # another process
    replicas.do("join", 1, life=newer)
    before = replicas.status()
    replicas.do("join", 1, life=life)
    assert replicas.session(1) == -1
    replicas.do("join", 1, life=newer)
    assert replicas.session(1) > first
    assert replicas.status().joined == before.joined
    own = replicas.do("draw", 0)
    replicas.do("open", 0, life=own)
    replicas.do("open", 0, life=replicas.do("draw", 0))
    begun = replicas.status().incarnation
    replicas.do("open", 0, life=own)
    assert (replicas.session(0), replicas.status().incarnation) == (-1, begun)
    assert not replicas.do("claim", 0, life=own)
    assert replicas.status().incarnation == begun


@pytest.mark.slow
def test_while_a_chief_restores_nobody_else_changes_the_variables():
    replicas = opened()
    before = replicas.status()
    graph = replicas.graph(0)
    feed = {graph.incarnation: before.incarnation}
    assert replicas.do("claim", 0) == 1
    assert replicas.status().incarnation == 0
    says = "superseded by a later incarnation"
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        replicas.sessions[0].run(graph.round_op, feed)
    for incarnation in (before.incarnation, -before.incarnation):
        position = (before.round_number, incarnation)
        answer = replicas.do("take_over", 1, position=position, whom=[1, 0, 0])
        assert not answer[1]
    replicas.do("open", 0)
    assert replicas.status().incarnation > before.incarnation


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("number", [0, 1], ids=["chief", "worker"])
def test_a_process_that_was_replaced_ends_by_itself(number, elastic):
    container = new_container()
    stands_still, goes_on = threading.Event(), threading.Event()
    replaced = []

    def build_two(task, **options):
        grad = tf.ones([3])
        return make(task, lambda _: [(grad, vector())], elastic=elastic, **options)

    def build_newer(task):
        return build_two(task, replica_index=number)

    def train_until(step):
        def drive(replica, model, session):
            while session.run(model.step) < step:
                session.run(model.train)
            return session.run([model.step, model.values])

        return drive

    def drive_older(replica, model, session):
        train_until(3)(replica, model, session)
        if replica != number:
            return train_until(8)(replica, model, session)
        stands_still.set()
        assert goes_on.wait(40)
        with pytest.raises(ReplicaReplacedError, match="another process") as raised:
            session.run(model.train)
        replaced.append(raised.value.replica)
        raise raised.value

    def run_older():
        with pytest.raises(ReplicaReplacedError):
            run_replicas(2, build_two, drive_older, container=container)

    older = threading.Thread(target=run_older, daemon=True)
    older.start()
    assert stands_still.wait(40)

    def drive_newer(replica, model, session):
        train_until(6)(replica, model, session)
        goes_on.set()
        return train_until(8)(replica, model, session)

    # On a server of its own, as local variables would be shared otherwise.
    where = 2 * number
    results = run_replicas(
        3, build_newer, drive_newer, container=container, who=[where]
    )
    step, (value,) = results[where]
    assert step >= 8
    np.testing.assert_array_equal(value, [-1.0 * step] * 3)
    older.join(40)
    assert replaced == [number]


@pytest.mark.slow
def test_only_who_has_not_arrived_for_this_round_is_evicted():
    replicas = opened()
    round_number, incarnation = position = replicas.position()
    for stale in ((round_number, incarnation - 1), (round_number + 1, incarnation)):
        replicas.do("evict", 1, position=stale, whom=[0, 0, 1])
    assert replicas.status().evicted == ()
    step = threading.Thread(
        target=lambda: replicas.sessions[2].run(replicas.models[2].train), daemon=True
    )
    step.start()
    wait_until(lambda: replicas.status().arrived == (2,))
    replicas.do("evict", 1, position=position, whom=[1, 0, 1])
    replicas.do("evict", 1, position=position, whom=[1, 0, 1])
    status = replicas.status()
    assert (status.evicted, status.evictions, status.missing) == ((0,), 1, (1,))
    replicas.do("leave", 1)
    assert replicas.status().left == (1,)
    # The chief needs no more than who has come.
    graph = replicas.graph(0)
    replicas.sessions[0].run(graph.round_op)
    step.join(20)
    assert not step.is_alive()
    (value,) = replicas.sessions[0].run(replicas.models[0].values)
    np.testing.assert_array_equal(value, [-5.0] * 3)
    replicas.do("join", 0)
    assert replicas.status().evicted == ()


@pytest.mark.slow
def test_of_several_that_take_over_the_first_does():
    replicas = opened()
    position = replicas.position()
    whom = [1, 0, 0]
    incarnation, has_begun = replicas.do("take_over", 1, position=position, whom=whom)
    assert has_begun
    assert incarnation > position[1]
    answer = replicas.do("take_over", 2, position=position, whom=whom)
    np.testing.assert_array_equal(answer, [incarnation, 0])
    status = replicas.status()
    assert (status.chief, status.incarnation) == (1, incarnation)
    assert (status.evicted, status.evictions) == ((0,), 1)
    replicas.do("close", 1)
    answer = replicas.do("take_over", 2, position=replicas.position(), whom=whom)
    assert not answer[1], "a run that has ended has no chief to be replaced"


@pytest.mark.slow
def test_a_start_goes_on_without_those_that_do_not_come():
    def drive(replica, model, session):
        session.run(model.train)
        return session.run([model.step, model.values]), model.opt.status(session)

    def late(task, **changes):
        return build(
            task, elastic=True, wait_timeout_s=20, start_timeout_s=6, **changes
        )

    results = run_replicas(3, late, drive, who=[0, 1])
    for (step, (value,)), status in results[:2]:
        assert (step, status.evicted) == (1, (2,))
        np.testing.assert_array_equal(value, [-2.0] * 3)

    def needs_all(task):
        return late(task, min_replicas=3)

    with pytest.raises(TimeoutError, match="Missing: 2"):
        run_replicas(3, needs_all, drive, who=[0, 1])

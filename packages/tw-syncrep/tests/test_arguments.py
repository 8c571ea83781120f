"""What is refused, with which words; what the hook says before the first step.

A private module is imported to read the run table, whose rows are not public.
"""

import json

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import in_threads

from tw_syncrep import SyncReplicasOptimizer
from tw_syncrep._protocol.run_table import ReplicaField, make_run_table, replica_keys

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def graph(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with tf.Graph().as_default() as graph:
        yield graph


def make(aggregate=1, **settings):
    return SyncReplicasOptimizer(
        v1.train.GradientDescentOptimizer(1.0), aggregate, **settings
    )


def pair(name="v"):
    return tf.ones([2]), v1.get_variable(name, [2])


def step():
    return v1.train.get_or_create_global_step()


def test_the_start_has_the_waits_timeout_by_default():
    assert make(wait_timeout_s=7).start_timeout_s == 7
    assert make(wait_timeout_s=7, start_timeout_s=9).start_timeout_s == 9
    assert make().wait_timeout_s == 600


def test_the_global_step_of_the_graph_is_the_default():
    made = v1.train.get_or_create_global_step()
    train_op = make().apply_gradients([pair()])
    step_counts = [op for op in made.graph.get_operations() if "AssignAdd" in op.type]
    assert made.handle in [tensor for op in step_counts for tensor in op.inputs]
    assert train_op.graph is made.graph


def test_variables_of_unknown_shape_are_named():
    v = v1.get_variable("u", initializer=tf.zeros([2]), validate_shape=False)
    v = tf.Variable(tf.zeros([2]), shape=[None], name="u2") if v.shape.rank else v
    with pytest.raises(ValueError, match="known shapes; got unknown dimensions in u2"):
        make().apply_gradients([(tf.ones([2]), v)], global_step=step())


def test_counts_may_be_numpys():
    opt = make(np.int64(2), total_num_replicas=np.int32(3), replica_index=0)
    opt.apply_gradients([pair()], global_step=step())
    assert opt.sync_graph.replicas == 3


@pytest.mark.parametrize(
    "aggregate, total, given, want",
    [(2, 2, -1, [0, 0]), (2, 3, -1, [0, 0, 0]), (5, 2, -1, [2, 1]), (2, 2, 3, [2, 1])],
)
def test_initial_tokens_are_as_many_as_asked_for_or_needed(
    aggregate, total, given, want
):
    opt = make(aggregate, total_num_replicas=total, replica_index=0)
    opt.apply_gradients([pair()], global_step=step())
    give = opt.get_init_tokens_op(given)
    table = make_run_table("", shared_name="sync_replicas/board")
    tokens = table.read(replica_keys(total, ReplicaField.INITIAL))
    with v1.Session() as session:
        session.run(give)
        np.testing.assert_array_equal(session.run(tokens), want)


def test_uninitialized_variables_are_named():
    opt = make()
    opt.apply_gradients([pair("first"), pair("second")], global_step=step())
    hook = opt.make_session_run_hook(True)
    hook.begin()
    with v1.Session() as session:
        session.run(step().initializer)
        with pytest.raises(RuntimeError, match="no value: first, second"):
            hook.after_create_session(session, tf.train.Coordinator())


def above(op):
    """All ops that must have run before one."""
    seen, todo = {op}, [op]
    while todo:
        one = todo.pop()
        before = {t.op for t in one.inputs} | set(one.control_inputs)
        todo += before - seen
        seen |= before
    return seen


def test_nothing_is_changed_before_the_round_is_decided():
    v = v1.get_variable("table", [4, 2])
    average = tf.train.ExponentialMovingAverage(0.5)
    opt = SyncReplicasOptimizer(
        v1.train.AdamOptimizer(0.1),
        1,
        variable_averages=average,
        variables_to_average=[v],
    )
    gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]))
    opt.apply_gradients([(gradient, v)], global_step=step())
    writes = ("Assign", "ResourceScatter", "ResourceApply")
    changes = [
        op for op in above(opt.sync_graph.round_op) if op.type.startswith(writes)
    ]
    # Moments and parameters, the powers of beta, the step, the average.
    assert len(changes) >= 9
    for change in changes:
        assert "While" in {op.type for op in above(change)}, change.name


def test_what_the_chief_runs_is_on_the_servers_alone():
    with tf.device("/job:worker/task:0"):
        with tf.device("/job:ps/task:0"):
            pairs, global_step = [pair()], step()
        opt = make(2)
        with tf.control_dependencies([tf.no_op(name="updates")]):
            opt.apply_gradients(pairs, global_step=global_step)
    ops = above(opt.sync_graph.round_op)
    assert {op.device.partition("/device")[0] for op in ops} == {"/job:ps/task:0"}
    assert "updates" not in {op.name for op in ops}


def in_a_loop(build):
    return tf.while_loop(
        lambda i: i < 2, lambda i: (build(), i + 1)[1], [tf.constant(0)]
    )


def in_a_branch(build):
    yes, no = (lambda: (build(), 1)[1]), (lambda: 0)
    return tf.cond(tf.constant(True), yes, no)


def in_an_old_branch(build):
    v1.disable_control_flow_v2()
    try:
        return in_a_branch(build)
    finally:
        v1.enable_control_flow_v2()


@pytest.mark.parametrize("where", [in_a_branch, in_an_old_branch, in_a_loop])
def test_the_bodies_of_branches_and_loops_are_refused(where):
    pairs, global_step = [pair()], step()
    with pytest.raises(RuntimeError, match="got a branch, loop or function of one"):
        where(lambda: make().apply_gradients(pairs, global_step=global_step))


def test_eager_mode_and_functions_are_refused():
    def build():
        make().apply_gradients([])

    def work(_):
        with pytest.raises(RuntimeError, match=r"got eager mode. Call it under tf\.G"):
            build()
        with pytest.raises(RuntimeError, match=r"got a tf\.function\. Call it under"):
            tf.function(build, autograph=False)()

    in_threads(work, [0])  # which is in no graph


# Which replica an optimizer belongs to.


def config(cluster, index):
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


@pytest.mark.parametrize(
    ("device", "told", "given"),
    [
        ("/job:worker/task:0", "", 1),
        ("/job:worker/task:1", "", None),
        ("/job:worker/task:0", config({"chief": ["a:1"], "worker": ["b:1"]}, 0), None),
        ("", config({"worker": ["a:1", "b:1"]}, 1), None),
    ],
    ids=["said", "the current device", "behind a chief", "TF_CONFIG"],
)
def test_a_replica_finds_that_it_is_the_second(monkeypatch, device, told, given):
    monkeypatch.setenv("TF_CONFIG", told)
    opt = make(2, replica_index=given)
    with tf.device(device):
        opt.apply_gradients([pair()], global_step=step())
    assert opt.sync_graph.replica == 1

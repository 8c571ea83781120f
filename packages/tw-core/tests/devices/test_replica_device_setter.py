"""Variables on parameter servers, the rest on a worker; compared with TensorFlow's."""

import pytest
import tensorflow as tf

from tw_core import replica_device_setter
from tw_core.devices import LeastLoadedTask, canonical_device

v1 = tf.compat.v1
theirs = v1.train.replica_device_setter

CLUSTER = {"ps": ["a:1", "b:1"], "worker": ["c:1", "d:1"]}
SPEC = tf.train.ClusterSpec(CLUSTER)


def places(setter):
    """Builds a model with an optimizer under ``setter``.

    Returns:
      Each op's name -> (whether it uses a variable, its device).
    """
    with tf.Graph().as_default() as graph, v1.device(setter):
        a = v1.get_variable("a", [2])
        with tf.device("/cpu:3"):
            b = v1.get_variable("b", [3])
        with tf.device("/job:worker/task:0"):
            pinned = tf.constant(1.0, name="pinned")
            v1.get_variable("mine", [2])
        with tf.device("/job:ps/task:1"):
            v1.get_variable("fixed", [2])
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        loss = tf.reduce_sum(a) * tf.reduce_sum(b) * pinned
        v1.train.AdamOptimizer().minimize(loss, var_list=[a, b])
        assert table is not None
        maybe = tf.less(loss, 0.5)
        tf.cond(maybe, lambda: loss + 1.0, lambda: loss - 1.0)
    return {
        op.name: (any(t.op.type == "VarHandleOp" for t in op.inputs), op.device)
        for op in graph.get_operations()
    }


SAME = {
    "tasks": {"ps_tasks": 2},
    "a worker of its own": {"ps_tasks": 2, "worker_device": "/job:worker/task:1"},
    "a cluster spec": {"cluster": SPEC},
    "a cluster definition": {"cluster": SPEC.as_cluster_def()},
    "a dictionary": {"cluster": CLUSTER},
    "another job": {"cluster": {"params": ["a:1"]}, "ps_device": "/job:params"},
    "no merging": {"ps_tasks": 2, "merge_devices": False},
    "no job": {"ps_tasks": 1, "ps_device": "/cpu:0", "worker_device": "/gpu:0"},
    "no device for variables": {"ps_tasks": 2, "ps_device": ""},
    "no device for the rest": {"ps_tasks": 2, "worker_device": ""},
    "op types": {"ps_tasks": 2, "ps_ops": ["AddV2"]},
    "a strategy": {"ps_tasks": 3, "ps_strategy": lambda op: len(op.name) % 3},
}


def differing(arguments):
    """Lists (op, our device, TensorFlow's device) where the two differ."""
    ours, own = places(replica_device_setter(**arguments)), places(theirs(**arguments))
    assert ours.keys() == own.keys()
    return [(op, *ours[op], own[op][1]) for op in ours if ours[op] != own[op]]


@pytest.mark.slow
def test_it_places_like_tensorflows_own_but_for_ops_that_use_a_variable():
    for name, arguments in SAME.items():
        assert all(uses_variable for _, uses_variable, *_ in differing(arguments)), name
    for none in (
        {},
        {"ps_tasks": 0},
        {"cluster": {"worker": ["a:1"]}},
        {"cluster": {}},
    ):
        assert replica_device_setter(**none) is theirs(**none) is None


def test_it_differs_where_tensorflow_puts_the_use_of_a_variable_on_the_worker():
    found = differing({"ps_tasks": 1})
    assert (
        "a/IsInitialized/VarIsInitializedOp",
        True,
        "/job:ps/task:0",
        "/job:worker",
    ) in found
    assert {ours for _, _, ours, _ in found} <= {
        "/job:ps/task:0",
        "/job:ps/task:0/device:CPU:3",
    }


def test_it_differs_where_tensorflow_invents_a_gpu_on_a_parameter_server():
    arguments = {"ps_tasks": 2, "worker_device": "/job:worker/task:1/gpu:0"}
    invented = [d for d in differing(arguments) if d[3] == f"{d[2]}/device:GPU:0"]
    assert "a/Read/ReadVariableOp" in [op for op, *_ in invented]
    assert {ours for _, _, ours, _ in invented} >= {"/job:ps/task:0", "/job:ps/task:1"}
    rest = [d for d in differing(arguments) if d not in invented]
    assert all(uses_variable for _, uses_variable, *_ in rest)


# By bytes.


def test_the_least_loaded_task_balances_bytes(graph):
    strategy = LeastLoadedTask(2)
    with v1.device(replica_device_setter(2, ps_strategy=strategy)):
        made = [v1.get_variable(f"v{n}", [n]) for n in (100, 60, 30, 20)]
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    tasks = [canonical_device(v.device)[:14] for v in (*made, table.resource_handle)]
    assert tasks == [f"/job:ps/task:{i}" for i in (0, 1, 1, 1, 0)]
    assert strategy.bytes_on == [400, 440]
    with v1.device(replica_device_setter(2, ps_strategy=strategy)):
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        optimizer.apply_gradients([(tf.ones([100]), made[0])])
    assert strategy.bytes_on == [800, 440]  # the slot, with its variable

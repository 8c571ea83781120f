"""Which replica an optimizer belongs to."""

import json

import pytest
import tensorflow as tf

from tw_syncrep import SyncReplicasOptimizer

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def graph(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with tf.Graph().as_default() as graph:
        yield graph


def built_replica(**settings):
    inner = v1.train.GradientDescentOptimizer(1.0)
    opt = SyncReplicasOptimizer(inner, 2, **settings)
    pairs = [(tf.ones([2]), v1.get_variable("v", [2]))]
    opt.apply_gradients(pairs, global_step=v1.train.get_or_create_global_step())
    return opt.sync_graph.replica


def test_the_replica_is_what_the_caller_says():
    with tf.device("/job:worker/task:0"):
        assert built_replica(replica_index=1) == 1


def test_the_replica_is_the_task_of_the_current_device(monkeypatch):
    with tf.device("/job:worker/task:1"):
        assert built_replica() == 1


def test_the_replica_counts_the_chief_of_the_cluster(monkeypatch):
    config = {"chief": ["a:1"], "worker": ["b:1"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": config, "task": task}))
    with tf.device("/job:worker/task:0"):
        assert built_replica() == 1


def test_the_replica_is_tf_configs_task_at_last(monkeypatch):
    config = {"worker": ["a:1", "b:1"]}
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": config, "task": task}))
    assert built_replica() == 1


def test_an_unknown_replica_is_refused():
    with pytest.raises(ValueError, match="cannot determine which replica this is"):
        built_replica()


def test_a_replica_beyond_the_total_is_refused():
    with pytest.raises(ValueError, match=r"replica 2 \(from replica_index=\) is not"):
        built_replica(replica_index=2)

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
    with tf.device(device):
        assert built_replica(replica_index=given) == 1


def test_an_unknown_replica_is_refused():
    with pytest.raises(ValueError, match="cannot determine which replica this is"):
        built_replica()


def test_a_replica_beyond_the_total_is_refused():
    with pytest.raises(ValueError, match=r"replica 2 \(from replica_index=\) is not"):
        built_replica(replica_index=2)

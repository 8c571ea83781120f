"""A task without a cluster does not begin a training of one, by any package."""

import json

import pytest
import tensorflow as tf

import tw_horovod as hvd
import tw_ranks
from tw_syncrep import SyncReplicasOptimizer

v1 = tf.compat.v1


def make_replica():
    with tf.Graph().as_default():
        descent = v1.train.GradientDescentOptimizer(1.0)
        replica = SyncReplicasOptimizer(descent, replicas_to_aggregate=1)
        step = v1.train.get_or_create_global_step()
        replica.minimize(v1.get_variable("w", [2])[0], global_step=step)


@pytest.mark.parametrize("begin", [tw_ranks.join, hvd.init, make_replica])
def test_a_task_without_a_cluster_does_not_begin_a_training_of_one(begin, monkeypatch):
    hvd.shutdown()  # Another test of this process may have begun.
    told = {"task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(told))
    with pytest.raises(ValueError, match="lists every task; got only the task"):
        begin()

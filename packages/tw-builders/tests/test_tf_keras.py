"""tf_keras models, legacy layers with UPDATE_OPS, and tf_keras optimizers in a graph.

They run in a process of their own, since TF_USE_LEGACY_KERAS is read when
TensorFlow is imported.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf
import tf_keras
from tw_builders import SyncMultiGPUReplicatedBuilder
from tw_core import get_current_tower_context
from tw_core.testing import CPUS, start_logical_cpus

start_logical_cpus()
v1 = tf.compat.v1
data = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)

def train(make_optimizer, named=True):
    def name(text):
        return text if named else None
    with tf.Graph().as_default():
        v1.set_random_seed(1)
        models = []

        def tower():
            context = get_current_tower_context()
            model = tf_keras.Sequential([
                tf_keras.layers.Dense(4, name=name("dense")),
                tf_keras.layers.BatchNormalization(momentum=0.5, name=name("norm")),
                tf_keras.layers.Dense(1, name=name("out")),
            ], name=name("model"))
            shard = tf.constant(np.split(data, 2)[context.index])
            out = model(shard, training=True)
            out = v1.layers.batch_normalization(out, training=True, name="legacy")
            models.append(model)
            own = context.get_collection_in_tower("trainable_variables")
            return list(zip(tf.gradients(tf.reduce_mean((out - 1) ** 2), own), own))

        builder = SyncMultiGPUReplicatedBuilder(list(CPUS[:2]), True, "cpu")
        grads = builder.call_for_each_tower(tower)
        train_op, sync = builder.build(grads, make_optimizer)
        updates = [op for model in models for op in model.updates]
        legacy = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
        with v1.Session() as sess:
            sess.run(v1.global_variables_initializer())
            sess.run(v1.local_variables_initializer())
            sess.run(sync)
            before = sess.run(models[0].layers[0].kernel)
            for _ in range(3):
                sess.run([train_op, *updates, *legacy])
            return {
                "before": before.tolist(),
                "trained": [sess.run(m.weights[0]).tolist() for m in models],
                "means": [sess.run(m.layers[1].moving_mean).tolist() for m in models],
                "updates": [len(updates), len(legacy)],
                "global": [v.name for v in v1.global_variables()],
                "local": [v.name for v in v1.local_variables()],
            }

def refusal(make_optimizer):
    try:
        train(make_optimizer)
    except TypeError as error:
        return str(error)

print(json.dumps({
    "v1 momentum": train(lambda: v1.train.MomentumOptimizer(0.1, 0.9)),
    "tf_keras legacy": train(lambda: tf_keras.optimizers.legacy.Adam(0.1)),
    "unnamed layers": train(lambda: tf_keras.optimizers.legacy.Adam(0.1), named=False),
    "refused": refusal(lambda: tf_keras.optimizers.Adam(0.1)),
}))
"""


@pytest.fixture(scope="module")
def trained():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"TF_USE_LEGACY_KERAS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no counterpart" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "optimizer", ["v1 momentum", "tf_keras legacy", "unnamed layers"]
)
def test_replicas_of_a_tf_keras_model_train_alike_with_statistics_of_their_own(
    trained, optimizer
):
    run = trained[optimizer]
    np.testing.assert_array_equal(*run["trained"])
    assert not np.allclose(run["trained"][0], run["before"])
    assert run["updates"] == [4, 4]
    first, second = run["means"]
    assert np.abs(first).max() > 0
    assert not np.array_equal(first, second)
    assert len(run["local"]) == len(run["global"])
    if optimizer != "unnamed layers":  # which TensorFlow numbers on
        assert not [name for name in run["global"] if "tower1" in name]
        assert all(name.startswith("tower1/") for name in run["local"])


def test_a_tf_keras_optimizer_that_would_update_nothing_is_refused(trained):
    assert "Adam, an optimizer of tf_keras, updates nothing" in trained["refused"]
    assert "tf_keras.optimizers.legacy" in trained["refused"]

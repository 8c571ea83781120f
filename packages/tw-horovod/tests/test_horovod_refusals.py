"""What ``tw_horovod`` does not do is refused, by name."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tw_horovod as hvd
import tw_horovod.keras as hvd_keras
from tw_core.flat_variables import FlatVariables, flatten, pack_gradients
from tw_core.internal import apply_pairs, create_slots

v1 = tf.compat.v1


@pytest.fixture(scope="module", autouse=True)
def alone():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TF_CONFIG", raising=False)
        hvd.init()
    yield
    hvd.shutdown()


REFUSED = {
    "hvd.allreduce(np.ones(2), op=hvd.Adasum)": "op must be .*got Adasum",
    "hvd.allreduce(np.ones(2), op=7)": "op must be one of .*got 7",
    "hvd.allreduce(np.ones(2), average=True, op=hvd.Sum)": "op and average",
    "hvd.allreduce(np.ones(2), process_set=[0])": "process_set must be",
    "hvd.allreduce(tf.constant(True))": "tensors must be .*0 is bool",
    "hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), [0], [3, 2]), op=hvd.Max)": (
        "takes tf.IndexedSlices with op Average or Sum"
    ),
    "hvd.allgather(1.0)": r"tensors must have rows.*0 is \(\)",
    "hvd.allgather(['a'])": "tensors must be .*0 is string",
    "hvd.broadcast(1.0, 5)": "broadcast: root must be below",
    "hvd.broadcast_object(1, 5)": "broadcast: root must be below",
    "hvd.broadcast_global_variables(0)": "broadcast_global_variables: .*session graph",
    "hvd.reducescatter(np.ones(2), op=hvd.Max)": "op must be .*got Max",
    "hvd.barrier(process_set=1)": "process_set must be",
    "hvd.init(comm=[0])": r"comm: .*\[0\]",
    "hvd.init(process_sets=[[0]])": "process_sets",
    "hvd.init(stall_timeout_s=0)": "stall_timeout_s",
    "hvd.ProcessSet([0])": "Not supported",
    "hvd.add_process_set([0])": "Not supported",
    "hvd.remove_process_set(hvd.global_process_set)": "Not",
    "hvd.size_op(1)": "process_set_id must be 0; got 1",
    "hvd.start_timeline('x')": "tf.profiler",
    "hvd.stop_timeline()": "tf.profiler",
    "hvd.elastic.run": "elastic.run: not supported",
    "hvd.DistributedOptimizer('sgd')": "needs an optimizer of keras.*got 'sgd'",
    "hvd.keras.DistributedOptimizer(SGD(), op=hvd.Max)": "op must be one of .*got Max",
    "hvd.DistributedOptimizer(hvd.DistributedOptimizer(SGD()))": "reduces .*already",
    "LossScaleOptimizer(hvd.DistributedOptimizer(SGD()))": "mixed_float16",
    "hvd.DistributedOptimizer(SGD(), groups=0)": "groups must be .*got 0",
    "hvd.DistributedOptimizer(SGD(), op=hvd.Sum, gradient_predivide_factor=2.0)": (
        "gradient_predivide_factor is for op Average; got 2.0 with Sum"
    ),
    "hvd.DistributedOptimizer(SGD(), backward_passes_per_step=0)": (
        "backward_passes_per_step"
    ),
    "hvd.DistributedGradientTape(1)": "gradtape must be a tf.GradientTape; got 1",
    "hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=1)": (
        r"local_layers must be Keras layers; got \[1\]"
    ),
    "hvd.keras.PartialDistributedOptimizer(None, local_layers=3)": (
        r"local_layers must be Keras layers; got \[3\]"
    ),
    "hvd.SyncBatchNormalization(fused=True)": "fused must be False; got True",
    "hvd.keras.load_model('x', legacy_opts=True)": "legacy_opts is not supported",
    "hvd.keras.elastic.KerasState": "elastic.KerasState: not supported",
    "hvd.keras.callbacks.CheckWeightsCallback(0)": "every must be at least 1; got 0",
    "hvd.keras.callbacks.BroadcastGlobalVariablesCallback(0, '', [1])": (
        "local_variables must be variables; got 1"
    ),
    "hvd.keras.callbacks.LearningRateScheduleCallback(None, 1.0)": "initial_lr must",
    "hvd.keras.broadcast_global_variables(0)": "a session graph's",
}


def scaled(optimizer):
    """Wraps an optimizer; before 3.10 Keras does not show it, and ``fit`` refuses."""
    around = keras.optimizers.LossScaleOptimizer(optimizer)
    if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 10):
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        model.compile(around, "mse")
        first = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(np.ones([1, 1]), np.ones([1, 1]), callbacks=[first], verbose=0)


NAMES = {
    "hvd": hvd,
    "np": np,
    "tf": tf,
    "SGD": keras.optimizers.SGD,
    "LossScaleOptimizer": scaled,
}


def test_what_is_refused_is_named():
    kinds = (NotImplementedError, RuntimeError, TypeError, ValueError)
    for statement, says in REFUSED.items():
        with pytest.raises(kinds) as said:
            exec(statement, dict(NAMES))
        assert re.search(says, str(said.value)), f"{statement}: {said.value}"


class Own(v1.train.GradientDescentOptimizer):
    """Is not known to update each element by itself."""


def test_flat_variables_need_an_elementwise_optimizer():
    with tf.Graph().as_default():
        with FlatVariables().scope():
            variable = v1.get_variable("w", [3])
        pairs = pack_gradients([(tf.ones([3]), variable)])
        with pytest.raises(ValueError, match="Own is not known to update each elem"):
            hvd.DistributedOptimizer(Own(0.1)).apply_gradients(pairs)
        known = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1))
        apply_pairs(known, pairs)
    flat = flatten(lambda: keras.Sequential([keras.Input([1]), keras.layers.Dense(1)]))
    variables = flat.trainable_variables
    with pytest.raises(ValueError, match="Lamb is not known to update each element"):
        create_slots(hvd.DistributedOptimizer(keras.optimizers.Lamb()), variables)
    create_slots(hvd.DistributedOptimizer(keras.optimizers.Adam()), variables)

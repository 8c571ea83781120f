"""tensorpack's names, collections and checkpoints, for programs that have them."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from session_builders import BUILDERS, build, new_session, pairs_of

import tw_builders
import tw_core
import tw_reduce.tensorpack
from tw_builders import tensorpack
from tw_core.testing import CPUS

v1 = tf.compat.v1
KEYS = v1.GraphKeys
TWO = list(CPUS[:2])
DATA = Path(__file__).parent / "data"
MOVING = tensorpack.MOVING_SUMMARY_OPS_KEY


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


# Names


def test_what_has_the_same_name_elsewhere_is_the_same_object():
    own = {"PredictTowerContext", "TowerContext", "TrainTowerContext"}
    for package in (
        tw_core,
        tw_core.contexts,
        tw_core.variables,
        tw_reduce,
        tw_builders,
    ):
        for name in set(tensorpack.__all__) & set(package.__all__) - own:
            assert getattr(tensorpack, name) is getattr(package, name), name


def test_tower_functions_and_handles_have_tensorpacks_names(graph):
    spec = tf.TensorSpec([2], tf.float32, name="x")
    function = tensorpack.TowerFuncWrapper(lambda x: x + 1.0, [spec])
    with tensorpack.TowerContext("tower0", is_training=True):
        function(tf.ones([2]))
    assert isinstance(function.towers, tensorpack.TowerTensorHandles)
    assert isinstance(function.towers[0], tensorpack.TowerTensorHandle)
    assert function.towers.training()[0].ns_name == "tower0"


@pytest.mark.parametrize(
    "name", ["DistributedReplicatedBuilder", "DistributedParameterServerBuilder"]
)
def test_a_builder_that_was_not_carried_on_says_what_to_use(name):
    said = f"{name} is not provided.*SyncMultiGPUParameterServerBuilder.*SyncReplicas"
    with pytest.raises(ImportError, match=said):
        getattr(tensorpack, name)
    with pytest.raises(ImportError, match=said):
        exec(f"from tw_builders.tensorpack import {name}")


# Collections


def run_moving_averages(graph, feeds):
    """Runs what tensorpack's callback runs in every training step."""
    with new_session() as session:
        ops = graph.get_collection(MOVING)
        session.run([op for op in ops], feeds)
        return len(ops)


def model(x):
    """Adds to the collection by hand, whatever the tower; needs its input to run."""
    w = v1.get_variable("w", [2], initializer=v1.ones_initializer())
    loss = tf.reduce_sum(w * x)
    average = v1.get_variable("average", [], trainable=False)
    v1.add_to_collection(MOVING, average.assign(0.9 * average + 0.1 * loss))
    return [(tf.gradients(loss, w)[0], w)]


@pytest.mark.parametrize("contexts", [tensorpack, tw_core.contexts])
def test_a_predict_tower_leaves_no_op_that_training_would_run(graph, contexts):
    builder = BUILDERS["replicated"](TWO)
    builder.call_for_each_tower(lambda: model(tf.ones([2])))
    with (
        v1.variable_scope(v1.get_variable_scope(), reuse=True),
        contexts.PredictTowerContext("predict") as predict,
    ):
        model(v1.placeholder(tf.float32, [2]))
    assert run_moving_averages(graph, {}) == 1
    assert len(predict.get_collection_in_tower(MOVING)) == 1


def test_training_towers_of_ones_own_leave_them_to_the_main_one(graph):
    for k in range(2):
        name = f"tower{k}"
        with tensorpack.TrainTowerContext(name, name if k else "", index=k, total=2):
            model(tf.ones([2]))
    assert run_moving_averages(graph, {}) == 1


@pytest.mark.parametrize("kind", [*BUILDERS, "an op per tower"])
def test_summaries_of_the_optimizer_function_appear_once(graph, kind):
    def get_opt_fn():
        rate = v1.get_variable("learning_rate", initializer=0.1, trainable=False)
        v1.summary.scalar("learning_rate", rate)
        average = v1.get_variable("rate_average", [], trainable=False)
        v1.add_to_collection(MOVING, average.assign(0.9 * average + 0.1 * rate))
        return v1.train.MomentumOptimizer(rate, 0.9)

    builder = BUILDERS.get(kind, BUILDERS["asynchronous"])(TWO)
    grads = builder.call_for_each_tower(lambda: model(tf.ones([2])))
    apply = builder.build if kind in BUILDERS else builder.build_tower_ops
    apply(grads, get_opt_fn)
    assert [s.op.name for s in graph.get_collection(KEYS.SUMMARIES)] == [
        "learning_rate_1"
    ]
    averages = graph.get_collection(MOVING)
    assert len([op for op in averages if "rate_average" in op.op.inputs[0].name]) == 1


def test_summaries_of_applying_equal_gradients_appear_once(graph):
    class Summarised(v1.train.MomentumOptimizer):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            v1.summary.scalar("norm", tf.linalg.global_norm([grads_and_vars[0][0]]))
            return super().apply_gradients(grads_and_vars, *args, **kwargs)

    builder = BUILDERS["replicated"](TWO)
    build(builder, lambda: model(tf.ones([2])), lambda: Summarised(0.1, 0.9))
    assert [s.op.name for s in graph.get_collection(KEYS.SUMMARIES)] == ["norm"]


# Checkpoints


def tower(x):
    """The model of the checkpoints in data/, without tensorpack's layers."""
    with v1.variable_scope("hidden"):
        w, b = v1.get_variable("W", [6, 5]), v1.get_variable("b", [5])
    with v1.variable_scope("bn"):
        beta, gamma = v1.get_variable("beta", [5]), v1.get_variable("gamma", [5])
        mean = v1.get_variable("mean/EMA", [5], trainable=False)
        variance = v1.get_variable("variance/EMA", [5], trainable=False)
    with v1.variable_scope("out"):
        out_w, out_b = v1.get_variable("W", [5, 3]), v1.get_variable("b", [3])
    h = (x @ w + b - mean) / tf.sqrt(variance + 1e-5) * gamma + beta
    loss = tf.reduce_mean((tf.nn.relu(h) @ out_w + out_b) ** 2)
    return pairs_of(loss, [w, b, beta, gamma, out_w, out_b])


def build_trainer(kind):
    """Builds the training graph that each checkpoint belongs to."""
    v1.train.get_or_create_global_step()
    v1.get_variable("learning_rate", initializer=0.0, trainable=False)
    make = BUILDERS["replicated" if kind == "replicated" else "asynchronous"]
    opt = partial(v1.train.AdamOptimizer, 0.05)
    return build(make(TWO), lambda: tower(tf.ones([4, 6])), opt)[1:]


@pytest.mark.parametrize("kind", ["replicated", "async"])
def test_a_checkpoint_of_tensorpacks_trainer_is_restored_whole(graph, kind):
    path = str(DATA / f"tensorpack_{kind}")
    train_op, sync_op = build_trainer(kind)
    mapped = tensorpack.assignment_map(path)
    saver = v1.train.Saver(mapped)
    reader = tf.train.load_checkpoint(path)
    assert set(mapped) == set(reader.get_variable_to_shape_map())
    renamed = [name for name, v in mapped.items() if name != v.op.name]
    assert [name.rpartition("/")[2] for name in renamed] == [
        "beta1_power",
        "beta2_power",
    ]
    with new_session() as session:
        saver.restore(session, path)
        for name, variable in mapped.items():
            np.testing.assert_array_equal(
                session.run(variable), reader.get_tensor(name), err_msg=name
            )
        if sync_op is not None:
            session.run(sync_op)
            copies = {v.op.name: session.run(v) for v in v1.local_variables()}
            for name in ("hidden/W", "hidden/W/Adam", "bn/mean/EMA"):
                want = reader.get_tensor(name)
                np.testing.assert_array_equal(copies[f"tower1/{name}"], want)
            power = reader.get_tensor("apply_gradients/beta1_power")
            np.testing.assert_array_equal(copies["tower1/beta1_power"], power)
        session.run(train_op)


def test_a_checkpoint_may_also_initialise_the_variables(graph):
    path = str(DATA / "tensorpack_replicated")
    build_trainer("replicated")
    v1.train.init_from_checkpoint(path, tensorpack.assignment_map(path))
    with new_session() as session:
        powers = [v for v in v1.global_variables() if v.op.name == "beta1_power"]
        # 1 + 3 steps of two towers: tensorpack advanced it once per tower.
        np.testing.assert_allclose(session.run(powers), [0.9**7], rtol=1e-6)


def test_a_checkpoint_written_here_is_mapped_onto_itself(graph, tmp_path):
    build_trainer("replicated")
    with new_session() as session:
        v1.train.Saver().save(session, str(tmp_path / "model"))
    mapped = tensorpack.assignment_map(str(tmp_path))  # a folder: the latest one
    assert mapped == {v.op.name: v for v in v1.global_variables()}
    v1.get_variable("new", [2])
    some = [mapped["hidden/W"]]  # may be restored alone
    path = str(DATA / "tensorpack_async")
    assert tensorpack.assignment_map(path, some) == {"hidden/W": some[0]}


def test_every_variable_that_a_checkpoint_does_not_fit_is_named(graph):
    v1.get_variable("new", [2])
    v1.get_variable("global_step", [], tf.int32, trainable=False)
    with v1.variable_scope("hidden"):
        v1.get_variable("W", [6, 7])
        v1.get_variable("b", [5])
    with pytest.raises(ValueError, match="assignment_map") as refused:
        tensorpack.assignment_map(str(DATA / "tensorpack_async"))
    for part in (
        "tensorpack_async does not fit: it has no new;",
        "it has global_step as int64 (), and the variable is int32 ();",
        "it has hidden/W as float32 (6, 5), and the variable is float32 (6, 7).",
    ):
        assert part in str(refused.value)

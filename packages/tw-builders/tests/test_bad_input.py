"""What builders refuse, and how they say it."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_builders import (
    AsyncMultiGPUBuilder,
    DataParallelBuilder,
    SyncMultiGPUParameterServerBuilder,
    SyncMultiGPUReplicatedBuilder,
    SyncMultiGPUShardedBuilder,
    apply_gradients,
    apply_shared_gradients,
    make_optimizers,
)
from tw_core import get_current_tower_context, towers
from tw_core.testing import CPUS

v1 = tf.compat.v1
TWO = list(CPUS[:2])
BUILDERS = {
    "parameter server": partial(SyncMultiGPUParameterServerBuilder, ps_device="cpu"),
    "replicated": partial(SyncMultiGPUReplicatedBuilder, average=True, mode="cpu"),
    "sharded": partial(SyncMultiGPUShardedBuilder, average=True),
    "asynchronous": AsyncMultiGPUBuilder,
}
each_builder = pytest.mark.parametrize("make", BUILDERS.values(), ids=BUILDERS)
descend = partial(v1.train.GradientDescentOptimizer, 0.1)


def tower_pairs():
    w = v1.get_variable("w", [2])
    return [(tf.gradients(tf.reduce_sum(w**2), w)[0], w)]


@each_builder
def test_devices_that_the_session_lacks_are_refused_with_those_it_has(make):
    with (
        tf.Graph().as_default(),
        v1.Session(config=v1.ConfigProto(device_count={"CPU": 2})),
        pytest.raises(ValueError, match=r"Unknown devices \['/cpu:5'\].*CPU:1"),
    ):
        make(["/cpu:0", "/cpu:5"]).call_for_each_tower(tower_pairs)


@each_builder
def test_several_towers_may_share_a_device(make, caplog):
    with tf.Graph().as_default():
        built = make(["/cpu:1", "/cpu:1"])
        grads = built.call_for_each_tower(tower_pairs)
        assert built.build(grads, descend) is not None
    assert "several towers on one device: /device:CPU:1 (2 towers)" in caplog.text


@each_builder
def test_eager_mode_is_refused(make):
    with pytest.raises(RuntimeError, match="session graph; got eager mode"):
        make(TWO).call_for_each_tower(tower_pairs)
    with pytest.raises(RuntimeError, match="session graph; got eager mode"):
        make(TWO).build([[], []], descend)


@each_builder
def test_a_tf_function_is_refused(make):
    @tf.function
    def traced():
        make(TWO).call_for_each_tower(tower_pairs)

    with pytest.raises(RuntimeError, match="session graph"):
        traced()


@each_builder
def test_towers_with_other_gradients_are_refused(make):
    with tf.Graph().as_default():
        w, b = v1.get_variable("w", [2]), v1.get_variable("b", [2])
        one = tf.ones([2])
        with pytest.raises(ValueError, match=r"b is missing from towers \[1\]"):
            make(TWO).build([[(one, w), (one, b)], [(one, w)]], descend)


def test_replicas_that_share_variables_are_refused_by_name_and_tower():
    with tf.Graph().as_default():
        w, b = v1.get_variable("w", [2]), v1.get_variable("b", [2])

        def tower():
            own = v1.get_variable("own", [2])
            loss = tf.reduce_sum(w**2 + b**2 + own**2)
            return list(zip(tf.gradients(loss, [w, b, own]), [w, b, own], strict=True))

        built = SyncMultiGPUReplicatedBuilder(list(CPUS[:3]), True, "cpu")
        grads = built.call_for_each_tower(tower)
        with pytest.raises(ValueError, match=r"^Every tower") as error:
            built.build(grads, descend)
    for name in ("w:0", "b:0"):
        assert f"{name} is one variable in towers [0, 1, 2], and would" in str(
            error.value
        )
    assert "own:0" not in str(error.value)


@pytest.mark.parametrize("in_function", [False, True])
def test_one_keras_model_for_two_towers_is_refused(in_function):
    ours, start = towers(list(CPUS[:3])), np.ones([3, 1], np.float32)
    one, other = (keras.Sequential([keras.layers.Dense(1)]) for _ in range(2))
    for model in (one, other):
        model.build([None, 3])
        model.layers[0].set_weights([start, start[0]])
    models = [one, other, one]
    optimizers = make_optimizers(ours, partial(keras.optimizers.SGD, 0.1))

    def step():
        grads = [[tf.ones([3, 1]), tf.ones([1])] for _ in models]
        apply_gradients(ours, grads, models, optimizers)

    with pytest.raises(
        ValueError, match=r"kernel:0 is one variable in towers \[0, 2\]"
    ):
        (tf.function(step, autograph=False) if in_function else step)()
    np.testing.assert_array_equal(one.get_weights()[0], start)


@pytest.mark.parametrize("name", ["parameter server", "asynchronous"])
def test_towers_with_variables_of_their_own_are_refused_where_they_share(name):
    with tf.Graph().as_default():
        grads = BUILDERS["replicated"](TWO).call_for_each_tower(tower_pairs)
        with pytest.raises(
            ValueError, match=r"w is a variable of their own in towers \[1\]"
        ):
            BUILDERS[name](TWO).build(grads, descend)


def test_shared_gradients_refuse_variables_of_their_own():
    first, second = tf.Variable([1.0], name="w"), tf.Variable([1.0], name="w")
    with pytest.raises(ValueError, match=r"w is a variable of their own in towers"):
        apply_shared_gradients(
            [[(tf.ones(1), first)], [(tf.ones(1), second)]], descend()
        )


@each_builder
def test_reference_variables_are_refused(make):
    with tf.Graph().as_default():
        w = v1.Variable([1.0, 2.0], use_resource=False, name="w")
        one = tf.ones([2])
        with pytest.raises(ValueError, match=r"reference variable.*enable_resource"):
            make(TWO).build([[(one, w)], [(one, w)]], descend)


def test_a_function_that_returns_the_same_optimizer_twice_is_refused():
    with tf.Graph().as_default():
        built = BUILDERS["replicated"](TWO)
        grads = built.call_for_each_tower(tower_pairs)
        only = descend()
        with pytest.raises(ValueError, match="Towers 0 and 1 got the same Gradient"):
            built.build(grads, lambda: only)


def test_variables_made_in_further_towers_are_refused():
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="may not make trainable variables"),
    ):
        DataParallelBuilder.call_for_each_tower(TWO, lambda: v1.Variable(1.0))


def test_apply_gradients_refuses_other_shapes():
    ours = towers(TWO)
    w = [[tf.Variable([1.0], name="w")], [tf.Variable([1.0], name="w")]]
    optimizers = make_optimizers(ours, descend)
    with pytest.raises(ValueError, match=r"gradients of shapes \['\(1,\)', '\(2,\)'\]"):
        apply_gradients(ours, [[tf.ones(1)], [tf.ones(2)]], w, optimizers)


def test_towers_on_devices_that_are_not_there_are_refused():
    ours = towers(["/cpu:0", "/cpu:99"])
    with pytest.raises(ValueError, match=r"Unknown devices .*cpu:99"):
        apply_gradients(ours, [[], []], [[], []], [descend(), descend()])
    with pytest.raises(ValueError, match=r"Unknown devices .*cpu:99"):
        make_optimizers(ours, descend)


def test_a_context_is_current_in_every_tower():
    with tf.Graph().as_default():
        seen = DataParallelBuilder.call_for_each_tower(
            TWO, lambda: get_current_tower_context().name
        )
    assert seen == ["tower0", "tower1"]
    assert get_current_tower_context() is None

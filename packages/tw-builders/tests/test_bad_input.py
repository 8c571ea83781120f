"""What builders refuse, and how they say it."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from session_builders import BUILDERS, pairs_of

from tw_builders import (
    DataParallelBuilder,
    SyncMultiGPUReplicatedBuilder,
    apply_gradients,
    apply_shared_gradients,
    make_optimizers,
)
from tw_core import towers
from tw_core.testing import CPUS

v1 = tf.compat.v1
TWO = list(CPUS[:2])
each_builder = pytest.mark.parametrize("make", BUILDERS.values(), ids=BUILDERS)
descend = partial(v1.train.GradientDescentOptimizer, 0.1)


def tower_pairs():
    w = v1.get_variable("w", [2])
    return pairs_of(tf.reduce_sum(w**2), [w])


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
def test_what_is_not_a_session_graph_is_refused(make):
    def in_towers():
        make(TWO).call_for_each_tower(tower_pairs)

    for build in (in_towers, lambda: make(TWO).build([[], []], descend)):
        with pytest.raises(RuntimeError, match="session graph; got eager mode"):
            build()
    with pytest.raises(RuntimeError, match="session graph"):
        tf.function(in_towers)()


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
            return pairs_of(tf.reduce_sum(w**2 + b**2 + own**2), [w, b, own])

        built = SyncMultiGPUReplicatedBuilder(list(CPUS[:3]), True, "cpu")
        grads = built.call_for_each_tower(tower)
        with pytest.raises(ValueError, match=r"^Every tower") as error:
            built.build(grads, descend)
    for name in ("w:0", "b:0"):
        assert f"{name} is one variable in towers [0, 1, 2], and would" in str(
            error.value
        )
    assert "own:0" not in str(error.value)


def test_one_keras_model_for_two_towers_is_refused():
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

    for call in (step, tf.function(step, autograph=False)):
        with pytest.raises(
            ValueError, match=r"kernel:0 is one variable in towers \[0, 2\]"
        ):
            call()
    np.testing.assert_array_equal(one.get_weights()[0], start)


@pytest.mark.parametrize("name", ["parameter server", "asynchronous"])
def test_towers_with_variables_of_their_own_are_refused_where_they_share(name):
    with tf.Graph().as_default():
        grads = BUILDERS["replicated"](TWO).call_for_each_tower(tower_pairs)
        with pytest.raises(
            ValueError, match=r"w is a separate variable in towers \[1\]"
        ):
            BUILDERS[name](TWO).build(grads, descend)
        first, second = (own[0][1] for own in grads)
        with pytest.raises(ValueError, match="w is a separate variable in towers"):
            apply_shared_gradients(
                [[(tf.ones(2), first)], [(tf.ones(2), second)]], descend()
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

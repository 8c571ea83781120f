"""Variables made under the override are local, by whatever means they are made."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core.variables import override_to_local_variable

v1 = tf.compat.v1
KEYS = v1.GraphKeys

MAKERS = {
    "get_variable": lambda: v1.get_variable("v", [2]),
    "old variable": lambda: v1.Variable([1.0], name="v"),
    "new variable": lambda: tf.Variable([1.0], name="v"),
    "with its usual collections": lambda: v1.get_variable(
        "v", [2], collections=[KEYS.GLOBAL_VARIABLES]
    ),
    "old, with its usual collections": lambda: v1.Variable(
        [1.0], name="v", collections=[KEYS.GLOBAL_VARIABLES]
    ),
    "keras": lambda: keras.Variable(np.ones(1, np.float32), name="v").value,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_variable_is_local_and_stays_trainable(graph, make):
    with override_to_local_variable():
        made = make()
    assert v1.global_variables() == []
    assert v1.local_variables() == v1.trainable_variables() == [made]
    with tf.Graph().as_default(), override_to_local_variable(enable=False):
        made = make()
        assert (v1.global_variables(), v1.local_variables()) == ([made], [])


def test_other_collections_and_variables_before_and_after_stay(graph):
    before = v1.get_variable("before", [2])
    with override_to_local_variable():
        with v1.variable_scope(v1.get_variable_scope(), reuse=True):
            assert v1.get_variable("before", [2]) is before
        made = v1.get_variable("v", [2], collections=[KEYS.GLOBAL_VARIABLES, "mine"])
        frozen = v1.get_variable("frozen", [2], trainable=False)
        mine = v1.get_variable("mine", [2], collections=["mine"])
        local = v1.get_local_variable("local", [2])
    after = v1.get_variable("after", [2])
    assert v1.get_collection("mine") == [made, mine]
    assert v1.local_variables() == [made, frozen, local]
    assert v1.global_variables() == [before, after]
    assert frozen not in v1.trainable_variables()


def test_variables_of_optimizers_partitions_and_bodies_are_local(graph):
    w = v1.get_variable("w", [2])
    optimizer = v1.train.AdamOptimizer()
    maybe = tf.less(tf.random.uniform([]), 0.5)
    with override_to_local_variable():
        optimizer.apply_gradients([(tf.ones([2]), w)])
        v1.get_variable("p", [4, 2], partitioner=v1.fixed_size_partitioner(2))
        tf.cond(maybe, lambda: v1.get_variable("b", []) + 1.0, lambda: 0.0)
    assert v1.global_variables() == [w]
    assert {v.op.name for v in v1.local_variables()} == {
        *("w/Adam", "w/Adam_1", "beta1_power", "beta2_power"),
        *("p/part_0", "p/part_1", "b"),
    }


def test_it_does_nothing_in_eager_mode_and_in_a_function():
    with override_to_local_variable():
        eager = tf.Variable(1.0)
    made = []

    @tf.function(autograph=False)
    def traced():
        with override_to_local_variable():
            if not made:
                made.append(tf.Variable(2.0))
        assert v1.local_variables() == []
        return eager + made[0]

    assert traced() == 3.0

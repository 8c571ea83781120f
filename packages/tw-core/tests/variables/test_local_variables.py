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
    assert v1.local_variables() == [made]
    assert v1.trainable_variables() == [made]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_switched_off_it_changes_nothing(graph, make):
    with override_to_local_variable(enable=False):
        made = make()
    assert v1.global_variables() == [made]
    assert v1.local_variables() == []


def test_other_collections_stay(graph):
    with override_to_local_variable():
        made = v1.get_variable("v", [2], collections=[KEYS.GLOBAL_VARIABLES, "mine"])
        frozen = v1.get_variable("frozen", [2], trainable=False)
    assert v1.get_collection("mine") == [made]
    assert v1.local_variables() == [made, frozen]
    assert v1.trainable_variables() == [made]


def test_a_variable_outside_of_the_global_ones_is_left_as_it_is(graph):
    before = v1.get_variable("before", [2])
    with override_to_local_variable():
        mine = v1.get_variable("mine", [2], collections=["mine"])
        local = v1.get_local_variable("local", [2])
    assert v1.get_collection("mine") == [mine]
    assert v1.local_variables() == [local]
    assert v1.global_variables() == [before]


def test_variables_made_before_and_after_stay_global(graph):
    before = v1.get_variable("before", [2])
    with override_to_local_variable():
        v1.get_variable("inside", [2])
    after = v1.get_variable("after", [2])
    assert v1.global_variables() == [before, after]


def test_a_variable_that_is_reused_stays_global(graph):
    before = v1.get_variable("w", [2])
    with (
        override_to_local_variable(),
        v1.variable_scope(v1.get_variable_scope(), reuse=True),
    ):
        assert v1.get_variable("w", [2]) is before
    assert v1.global_variables() == [before]


def test_all_of_an_optimizers_variables_are_local(graph):
    w = v1.get_variable("w", [2])
    optimizer = v1.train.AdamOptimizer()
    with override_to_local_variable():
        optimizer.apply_gradients([(tf.ones([2]), w)])
    assert v1.global_variables() == [w]
    names = {v.op.name for v in v1.local_variables()}
    assert names == {"w/Adam", "w/Adam_1", "beta1_power", "beta2_power"}


def test_the_parts_of_a_partitioned_variable_are_local(graph):
    with override_to_local_variable():
        v1.get_variable("w", [4, 2], partitioner=v1.fixed_size_partitioner(2))
    assert v1.global_variables() == []
    assert [v.op.name for v in v1.local_variables()] == ["w/part_0", "w/part_1"]


def test_a_variable_made_in_a_body_is_local(graph):
    maybe = tf.less(tf.random.uniform([]), 0.5)
    with override_to_local_variable():
        tf.cond(maybe, lambda: v1.get_variable("w", []) + 1.0, lambda: 0.0)
    assert v1.global_variables() == []
    assert [v.op.name for v in v1.local_variables()] == ["w"]


def test_a_saver_leaves_local_variables_out(graph, tmp_path):
    v1.get_variable("kept", [1])
    with override_to_local_variable():
        v1.get_variable("copy", [1])
    with v1.Session() as sess:
        sess.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        path = v1.train.Saver().save(sess, str(tmp_path / "model"))
    assert [name for name, _ in tf.train.list_variables(path)] == ["kept"]


def test_an_exception_ends_the_override(graph):
    with pytest.raises(KeyError, match="boom"), override_to_local_variable():
        raise KeyError("boom")
    made = v1.get_variable("v", [2])
    assert v1.global_variables() == [made]


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


def test_a_reference_variable_is_refused(graph, reference_variables):
    want = "w:0 is a reference variable; only resource var"
    with pytest.raises(ValueError, match=want), override_to_local_variable():
        v1.get_variable("w", [2])

"""Resource, Keras and reference variables are told apart, and the ops that use them."""

# Private import: how reference variables are named and refused, for all callers.

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core._variable_kinds import (
    device_of_variable,
    hands_on,
    is_reference_variable,
    is_variable,
    refuse_reference_op,
    refuse_reference_variables,
    tf_variable,
)

v1 = tf.compat.v1


def make_all():
    return [
        v1.get_variable("got", [2]),
        v1.Variable(1.0, name="old"),
        tf.Variable(1.0, name="new"),
        keras.Variable(np.ones(2, np.float32), name="keras"),
    ]


def test_todays_variables_are_accepted(graph):
    for variable in make_all():
        assert is_variable(variable)
        assert not is_reference_variable(variable)
        assert isinstance(tf_variable(variable), tf.Variable)
    for other in (None, 3, "w", np.ones(2), tf.constant(1.0)):
        assert not is_variable(other)
    refuse_reference_variables([tf.Variable(0), keras.Variable(0.0)])


def test_a_keras_variable_holds_the_tensorflow_variable_with_its_value():
    variable = keras.Variable(3.0)
    tf_variable(variable).assign(4.0)
    assert float(variable.numpy()) == 4.0
    assert is_variable(variable) and not is_reference_variable(variable)


def test_reference_variables_are_refused_each_by_name(graph, reference_variables):
    made = make_all()
    assert [is_reference_variable(v) for v in made] == [True, True, False, False]
    with pytest.raises(ValueError) as error:
        refuse_reference_variables([*made, *made])
    message = str(error.value)
    assert message.startswith("got:0 is a reference variable; only resource")
    assert message.count("old:0 is a reference variable") == 1
    assert "tf.compat.v1.enable_resource_variables()" in message
    assert "new" not in message
    with pytest.raises(ValueError, match="old is a reference variable; only resou"):
        refuse_reference_op(made[1].op)
    refuse_reference_op(made[2].op)


def test_an_op_that_uses_a_variable_has_the_variables_device(graph):
    with tf.device("/cpu:2"):
        w = v1.get_variable("w", [2])
    with tf.device("/cpu:5"):
        tf.gather(w.read_value(), [0])
        tf.gather(w, [0])
        w.assign([1.0, 2.0])
    users = [op for op in graph.get_operations() if w.handle in op.inputs]
    assert {"ReadVariableOp", "ResourceGather", "AssignVariableOp"} <= {
        op.type for op in users
    }
    assert {device_of_variable(op) for op in users} == {"/device:CPU:2"}
    assert device_of_variable(w.handle.op) == ""
    assert device_of_variable(tf.constant(0).op) == ""


def test_an_op_that_hands_a_variable_to_a_body_does_not_use_it(graph):
    with tf.device("/cpu:2"):
        w = v1.get_variable("w", [])
    maybe = tf.less(tf.random.uniform([]), 0.5)
    tf.cond(maybe, lambda: w + 1.0, lambda: w - 1.0)
    tf.while_loop(lambda x: x < w, lambda x: [x + w], [0.0])
    tf.function(lambda: w + 1.0, autograph=False)()
    callers = [
        op for op in graph.get_operations() if w.handle in op.inputs and hands_on(op)
    ]
    assert {op.type for op in callers} == {"If", "While", "StatefulPartitionedCall"}
    assert {device_of_variable(op) for op in callers} == {""}

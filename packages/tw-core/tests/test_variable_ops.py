"""Ops that use a variable are found, and ops that make a reference variable refused."""

# Private import: what the device functions ask of an op.

import pytest
import tensorflow as tf

from tw_core._variable_kinds import device_of_variable, hands_on, refuse_reference_op

v1 = tf.compat.v1


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


def test_other_ops_and_the_variable_itself_have_none(graph):
    w = v1.get_variable("w", [2])
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


def test_the_op_of_a_reference_variable_is_refused(graph, reference_variables):
    old, new = v1.get_variable("old", [1]), tf.Variable(1.0)
    with pytest.raises(ValueError, match="old is a reference variable; only resou"):
        refuse_reference_op(old.op)
    refuse_reference_op(new.op)

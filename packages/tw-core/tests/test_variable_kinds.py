"""Resource, Keras and reference variables are told apart, and the ops that use them."""

# Private import: how reference variables are named and refused, for all callers.

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core._variable_kinds import (
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

"""Resource, Keras and reference variables are told apart, and the ops that use them."""

# Private import: how reference variables are named and refused, for all callers.

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core import (
    LeastLoadedDeviceSetter,
    TrainTowerContext,
    copy_to_replicas,
    replica_device_setter,
)
from tw_core._variable_kinds import (
    is_reference_variable,
    is_variable,
    refuse_reference_op,
    refuse_reference_variables,
    tf_variable,
)
from tw_core.gradients import check_grad_list
from tw_core.variables import override_to_local_variable

v1 = tf.compat.v1
BALANCED = LeastLoadedDeviceSetter("/cpu:0", ["/cpu:1"])
SCOPES = {
    "a tower": lambda: TrainTowerContext("tower0"),
    "local variables": override_to_local_variable,
    "devices": lambda: v1.device(BALANCED),
    "servers": lambda: v1.device(replica_device_setter(1)),
}
CALLS = {
    "pairs": lambda w: check_grad_list([[(tf.zeros([2]), w)]] * 2),
    "copies": lambda w: copy_to_replicas([[w], [v1.get_variable("b", [2])]]),
    "balance": lambda w: BALANCED.place_with_balance(w.op),
}


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


@pytest.mark.parametrize("name", [*SCOPES, *CALLS])
def test_reference_variables_are_refused_where_they_are_made_or_given(
    graph, reference_variables, name
):
    made = v1.get_variable("w", [2]) if name in CALLS else None
    says = r"\bw(:0)? is a reference variable; only resource variables"
    with pytest.raises(ValueError, match=says):
        if name in CALLS:
            CALLS[name](made)
        else:
            with SCOPES[name]():
                v1.get_variable("w", [2])

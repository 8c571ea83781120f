"""Whose variables the towers of a session graph use, under each policy."""

import pytest
import tensorflow as tf

from tw_core import Replicated, Shared, map_towers, towers
from tw_core.devices import canonical_device

v1 = tf.compat.v1
TOWERS = towers(["/cpu:4", "/cpu:5"])


def model():
    w = v1.get_variable("w", [100])
    b = v1.get_variable("b", [40], initializer=v1.zeros_initializer())
    c = v1.get_variable("c", [60], trainable=False)
    return [w, b, c], tf.reduce_sum(w) + tf.reduce_sum(b) + tf.reduce_sum(c)


def build(policy):
    """Builds the model in each tower; returns [K][N] variables and [K] losses."""

    def in_tower(tower):
        with policy.scope(tower):
            return model()

    variables, losses = zip(*map_towers(in_tower, TOWERS), strict=True)
    return variables, losses


def devices(tensors):
    return [canonical_device(t.device) for t in tensors]


@pytest.fixture(params=[None, "outer"])
def scope(request, graph):
    """The top level, or a variable scope."""
    if request.param is None:
        yield ""
        return
    with v1.variable_scope(request.param):
        yield f"{request.param}/"


def test_shared_variables_are_the_same_in_every_tower(scope):
    variables, losses = build(Shared())
    assert [v.op.name for v in variables[0]] == [f"{scope}{n}" for n in "wbc"]
    assert all(v is w for v, w in zip(*variables, strict=True))
    assert v1.local_variables() == []
    assert Shared().trainable_variables(TOWERS[1]) == variables[0][:2]
    assert set(devices(variables[0])) == {"/device:CPU:4"}
    with v1.variable_scope("spread"):  # by bytes
        variables, others = build(Shared(("/cpu:1", "/cpu:2")))
    assert devices(variables[0]) == [f"/device:CPU:{i}" for i in (1, 2, 2)]
    assert devices([*losses, *others]) == ["/device:CPU:4", "/device:CPU:5"] * 2
    missing = pytest.raises(ValueError, match=r"Variable .*own does not exist")
    with Shared().scope(TOWERS[1]), missing:
        v1.get_variable("own", [1])


def test_replicated_variables_are_each_towers_own(scope):
    variables, losses = build(Replicated())
    assert [v.op.name for v in variables[1]] == [f"{scope}tower1/{n}" for n in "wbc"]
    assert v1.global_variables() == variables[0]
    assert v1.local_variables() == variables[1]
    assert v1.trainable_variables() == [*variables[0][:2], *variables[1][:2]]
    for k, device in enumerate(["/device:CPU:4", "/device:CPU:5"]):
        assert set(devices([*variables[k], losses[k]])) == {device}
        assert Replicated().trainable_variables(TOWERS[k]) == variables[k][:2]
    with v1.variable_scope("second"):
        shared, _ = build(Shared())  # which are tower 0's
    own = Replicated().trainable_variables(TOWERS[0])
    assert own == [*variables[0][:2], *shared[0][:2]]


@pytest.mark.parametrize("policy", [Shared(), Replicated()])
def test_wrapped_graph_code_may_use_the_policies(policy):
    wrapped = tf.compat.v1.wrap_function(lambda: build(policy)[1], [])
    assert len(wrapped()) == 2
    assert len(wrapped.graph.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES)) in (2, 4)

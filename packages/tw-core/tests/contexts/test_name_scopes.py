"""A tower's name scope is exactly its name, or the tower is refused."""

import pytest
import tensorflow as tf

from tw_core import TowerContext, towers


def tower(name="tower0"):
    return TowerContext(name, is_training=True)


def test_ops_are_named_below_the_tower(graph):
    with tower(""):
        assert tf.constant(0).name == "Const:0"
    with towers(["/cpu:0"])[0].scope(), tower():
        assert tf.constant(0).name == "tower0/Const:0"
        with tf.name_scope("layer"):
            assert tf.constant(0).name == "tower0/layer/Const:0"
    with tf.name_scope("outer"):  # which does not become part of the name
        with tower("tower1"):
            assert tf.constant(0).name == "tower1/Const:0"
        assert tf.constant(0).name == "outer/Const:0"
        want = r"TrainTowerContext\(''.*the name scope 'outer'"
        with pytest.raises(ValueError, match=want), tower(""):
            pass
    want = "has something named 'tower0' already"
    with pytest.raises(ValueError, match=want), tower():
        pass


@pytest.mark.parametrize("taken", ["tower0", "Tower0"])
def test_a_taken_name_is_refused_and_nothing_is_left_behind(graph, taken):
    with tf.name_scope(taken):
        tf.constant(0)
    want = "has something named 'tower0' already, .* named 'tower0_1'; give the tower"
    with pytest.raises(ValueError, match=want), tower():
        pass
    assert tf.constant(0).name == "Const:0"
    with tf.name_scope("tower0"):
        assert graph.get_name_scope() == "tower0_1"  # as if no tower had tried

"""A tower function builds towers under contexts only, and remembers them."""

import pytest
import tensorflow as tf

from tw_core import TowerContext
from tw_core.contexts import TowerFunc

SIGNATURE = [tf.TensorSpec([], name="a"), tf.TensorSpec([], name="b")]


def test_it_returns_what_the_function_returns(graph):
    func = TowerFunc(lambda a, b: (b, a), SIGNATURE)
    with TowerContext("tower0", is_training=True):
        assert func(1, 2) == (2, 1)
    assert func.towers[0].inputs == [1, 2]
    assert func.towers[0].outputs == (2, 1)


def test_wrapping_twice_wraps_once(graph):
    func = TowerFunc(lambda a, b: a, SIGNATURE)
    with TowerContext("tower0", is_training=True):
        func(1, 2)
    again = TowerFunc(func, [])
    assert again is func
    assert again.input_signature == tuple(SIGNATURE)
    assert len(again.towers) == 1


@pytest.mark.parametrize("name", ["a:0", "a/b", "a b", "", None, 3])
def test_an_input_name_that_would_not_be_found_is_refused(name):
    class Spec:
        pass

    Spec.name = name
    with pytest.raises(ValueError, match="TowerFunc: every input needs a name of its "):
        TowerFunc(print, [Spec])


def test_a_call_outside_of_towers_is_refused(graph):
    func = TowerFunc(lambda a, b: a, SIGNATURE)
    with pytest.raises(RuntimeError, match="TowerFunc: call it under a tower context"):
        func(1, 2)
    assert len(func.towers) == 0


def test_a_tower_that_failed_is_not_remembered(graph):
    def fail():
        raise KeyError("boom")

    func = TowerFunc(fail, [])
    with (
        pytest.raises(KeyError, match="boom"),
        TowerContext("tower0", is_training=True),
    ):
        func()
    assert len(func.towers) == 0

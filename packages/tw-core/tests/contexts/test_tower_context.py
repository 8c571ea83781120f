"""Training and inference towers: whose variables, what is refused, what is left."""

import keras
import pytest
import tensorflow as tf

from tw_core import TowerContext, TrainTowerContext
from tw_core.contexts import BaseTowerContext, PredictTowerContext
from tw_core.variables import override_to_local_variable

v1 = tf.compat.v1


def train(index, vs_name="", total=4):
    return TrainTowerContext(f"tower{index}", vs_name, index=index, total=total)


def reusing(reuse=True):
    return v1.variable_scope(v1.get_variable_scope(), reuse=reuse)


def names(variables):
    return [v.name for v in variables]


# What a tower says of itself.


def test_a_context_is_made_by_what_it_is_for_and_knows_its_place(graph):
    training = TowerContext("tower0", is_training=True, vs_name="own")
    inference = TowerContext("predict", is_training=False, vs_name="own")
    assert isinstance(training, TrainTowerContext)
    assert isinstance(inference, PredictTowerContext)
    for context in (training, inference):
        assert isinstance(context, BaseTowerContext)
        assert context.vs_name == "own"
        assert context.ns_name == context.name
        with pytest.raises(RuntimeError, match="enter the tower first"):
            _ = context.graph
        with context:
            assert context.graph is graph
        assert context.graph is graph
        with pytest.raises(ValueError, match="was entered before; make a new"), context:
            pass
    assert repr(training) == "TrainTowerContext('tower0', vs_name='own')"
    assert (training.name, inference.name) == ("tower0", "predict")
    tower = TrainTowerContext("tower2", index=2, total=3)
    assert (tower.index, tower.total, tower.is_training) == (2, 3, True)
    assert not tower.is_main_training_tower
    tower = TowerContext("", is_training=True)
    assert (tower.index, tower.total) == (0, 1)
    assert tower.is_main_training_tower and tower.has_own_variables
    assert not train(1).has_own_variables and train(1, "own").has_own_variables


@pytest.mark.parametrize(
    ("reuse", "own"), [(None, True), (True, False), (v1.AUTO_REUSE, False)]
)
def test_an_inference_tower_owns_variables_unless_the_scope_reuses(graph, reuse, own):
    early = PredictTowerContext("predict")
    assert early.has_own_variables
    with reusing(reuse):
        tower = PredictTowerContext("predict")
        with early:  # where it is entered counts
            assert tower.has_own_variables is early.has_own_variables is own
    assert not tower.is_main_training_tower and not tower.is_training


# Whose variables.


def build():
    """A layer in a scope with a default name, which TensorFlow numbers."""
    with v1.variable_scope(None, default_name="layer"):
        return v1.get_variable("w", [2])


def test_towers_share_the_main_towers_variables(graph):
    variables = []
    for k in range(3):
        with train(k):
            assert bool(v1.get_variable_scope().reuse) == (k > 0)
            variables.append([build(), build()])
        assert not v1.get_variable_scope().reuse
    assert names(v1.global_variables()) == ["layer/w:0", "layer_1/w:0"]
    assert all(own == variables[0] for own in variables)


@pytest.mark.parametrize("local", [False, True])
def test_towers_with_a_vs_name_make_their_own(graph, local):
    for k in range(2):
        with override_to_local_variable(local and k > 0), train(k, "own" if k else ""):
            build()
    assert names(v1.trainable_variables()) == ["layer/w:0", "own/layer/w:0"]
    assert names(v1.local_variables()) == ["own/layer/w:0"] * local


def test_an_inference_tower_uses_the_variables_of_the_training_tower_it_names(graph):
    for k in range(2):
        with train(k, "tower1" if k else ""):
            build()
    with reusing():
        with PredictTowerContext("predict0"):
            first = build()
        with PredictTowerContext("predict1", vs_name="tower1"):
            second = build()
    assert names([first, second]) == ["layer/w:0", "tower1/layer/w:0"]
    assert len(v1.global_variables()) == 2
    with tf.Graph().as_default(), PredictTowerContext(""):
        assert build().name == "layer/w:0"  # alone, it makes them


def test_auto_reuse_lets_the_main_tower_be_built_again(graph):
    for name in ("tower0", "again"):
        with reusing(v1.AUTO_REUSE), TowerContext(name, is_training=True):
            build()
    assert names(v1.global_variables()) == ["layer/w:0"]


# What is refused.


@pytest.mark.parametrize("inner", [train(1), PredictTowerContext("predict")])
def test_nesting_is_refused_and_leaves_the_outer_tower_as_it_was(graph, inner):
    def body():
        with train(2):
            return tf.constant(0)

    with train(0) as outer:
        want = r"cannot be entered inside TrainTowerContext\('tower0'"
        with pytest.raises(ValueError, match=want), inner:
            pass
        with pytest.raises(ValueError, match=want):
            tf.cond(tf.less(tf.random.uniform([]), 0.5), body, body)
        assert tf.constant(0).name.startswith("tower0/Const")
    assert outer.graph is graph


def test_an_open_variable_scope_is_refused_for_training(graph):
    tower = train(0)
    with v1.variable_scope("outer"):
        with pytest.raises(ValueError, match="got the variable scope 'outer'"):
            train(0)
        with pytest.raises(ValueError, match="got the variable scope 'outer'"), tower:
            pass
        with PredictTowerContext("predict"):
            assert build().name == "outer/layer/w:0"


@pytest.mark.parametrize("context", [(0, ""), (1, "tower1")])
def test_own_variables_under_reuse_are_refused(graph, context):
    with reusing(), pytest.raises(ValueError, match="makes its own variables, but"):
        train(*context)


def test_trainable_variables_of_a_tower_that_may_not_are_all_named(graph):
    want = r"tower1.*may not make .*got \['tower1/a:0', 'tower1/b:0'\].*a vs_name"
    with pytest.raises(ValueError, match=want), train(1):
        v1.Variable(0.0, name="c", trainable=False)
        tf.Variable(0.0, name="a")
        v1.Variable(0.0, name="b")
    with train(2):  # The refusal leaves the next one clean.
        assert tf.constant(0).name == "tower2/Const:0"


def hidden_in_a_body():
    made = lambda: tf.Variable(1.0, name="hidden").read_value()  # noqa: E731
    tf.cond(tf.less(tf.random.uniform([]), 0.5), made, lambda: 0.0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (hidden_in_a_body, "hidden"),
        (lambda: keras.layers.Dense(2)(tf.ones([1, 3])), ".*kernel.*bias"),
    ],
)
def test_variables_are_refused_however_they_are_made(graph, make, says):
    def in_tower():
        with train(1):
            make()

    for build in (in_tower, tf.function(in_tower, autograph=False)):
        with pytest.raises(ValueError, match=f"may not make .*{says}"):
            build()
    with (
        pytest.raises(ValueError, match=rf"may not make .*{says}"),
        reusing(v1.AUTO_REUSE),
        PredictTowerContext("predict"),
    ):
        make()

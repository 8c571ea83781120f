"""A build that fails leaves collections as they were; the next one finds its names."""

import numpy as np
import pytest
import tensorflow as tf

from tw_core import TrainTowerContext
from tw_core.internal import tower_build
from tw_core.variables import variable_origin

v1 = tf.compat.v1
KEYS = v1.GraphKeys


def build(model, *, fails=False, total=2):
    """Builds ``model`` in towers with variables of their own."""
    made = []
    number = len(
        {op.name.split("/")[0] for op in v1.get_default_graph().get_operations()}
    )
    with tower_build(undo_on_error=True):
        for k in range(total):
            vs_name = f"tower{k}" if k else ""
            with TrainTowerContext(f"tower{k}_{number}", vs_name, k, total):
                made.append(model())
        if fails:
            raise KeyError("boom")
    return made


def fail(model):
    with pytest.raises(KeyError, match="boom"):
        build(model, fails=True)


def contents(graph):
    keys = graph.get_all_collection_keys()
    return {key: items for key in keys if (items := graph.get_collection(key))}


def full_model(start=1.0):
    w = v1.get_variable(
        "w",
        [2],
        initializer=v1.constant_initializer(start),
        regularizer=lambda v: start * tf.reduce_sum(v),
    )
    mean = v1.get_variable("mean", [2], trainable=False)
    v1.get_variable("count", [], collections=["mine", KEYS.LOCAL_VARIABLES])
    v1.add_to_collection(KEYS.UPDATE_OPS, mean.assign(mean + 1.0))
    v1.summary.scalar("loss", tf.reduce_sum(w))
    return w, mean, tf.Variable(3.0, name="plain")


def test_variables_are_taken_over_with_what_the_next_build_asks_for(graph):
    v1.get_variable("before", [2])
    before = contents(graph)
    fail(full_model)
    fail(full_model)
    assert contents(graph) == before
    towers = build(lambda: full_model(start=4.0))
    origins = [[variable_origin(v) for v in own] for own in towers]
    names = [v.op.name for v in towers[0]]
    assert names[:2] == ["w", "mean"]
    assert [[own.original for own in tower] for tower in origins] == [names] * 2
    assert [{own.tower for own in tower} for tower in origins] == [{0}, {1}]
    (first, *_), (second, *_) = towers
    assert [v.name for v in (first, second)] == ["w:0", "tower1/w:0"]
    assert first in v1.trainable_variables()
    assert [v.name for v in v1.get_collection("mine")] == ["count:0", "tower1/count:0"]
    assert len(v1.get_collection(KEYS.REGULARIZATION_LOSSES)) == 2
    assert len(v1.get_collection(KEYS.UPDATE_OPS)) == 2
    with v1.Session() as session:
        session.run(
            [v1.global_variables_initializer(), v1.local_variables_initializer()]
        )
        np.testing.assert_array_equal(session.run(first), [4.0, 4.0])
        losses = session.run(v1.get_collection(KEYS.REGULARIZATION_LOSSES))
        assert losses == [32.0, 32.0]


STARTS = {
    "nothing": ({"shape": [2]}, None),
    "a class": ({"shape": [2], "initializer": v1.ones_initializer}, [1.0, 1.0]),
    "a value": ({"initializer": np.float32([5, 6])}, [5.0, 6.0]),
    "a function": ({"initializer": lambda: tf.constant([7.0, 8.0])}, [7.0, 8.0]),
    "whole numbers": ({"initializer": [1, 2]}, [1, 2]),
}


@pytest.mark.parametrize(("asked", "want"), STARTS.values(), ids=STARTS.keys())
def test_every_kind_of_initial_value_is_asked_for_again(graph, asked, want):
    fail(lambda: v1.get_variable("w", **asked))
    made = build(lambda: v1.get_variable("w", **asked))
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for value in session.run(made):
            assert value.shape == (2,)
            if want is not None:
                np.testing.assert_array_equal(value, want)


OTHER = {
    "shape": ({"shape": [3]}, r"shape \(3,\) \(it has \(2,\)\)"),
    "value": ({"initializer": [1.0, 2.0, 3.0]}, r"shape \(3,\) \(it has \(2,\)\)"),
    "dtype": ({"shape": [2], "dtype": tf.float64}, r"dtype .*float64"),
    "trainable": ({"shape": [2], "trainable": False}, "trainable False"),
}


@pytest.mark.parametrize(("asked", "said"), OTHER.values(), ids=OTHER.keys())
def test_another_kind_of_variable_is_refused_by_name(graph, asked, said):
    fail(lambda: v1.get_variable("w", [2]))
    with pytest.raises(
        ValueError, match=rf"'w' was made by a build that .*{said}.*another name"
    ):
        build(lambda: v1.get_variable("w", **asked))


def test_names_of_builds_that_worked_are_refused_as_tensorflow_does(graph):
    build(lambda: v1.get_variable("w", [2]))
    fail(lambda: v1.get_variable("b", [2]))
    with pytest.raises(ValueError, match="Variable w already exists"):
        build(lambda: v1.get_variable("w", [2]))
    with pytest.raises(KeyError, match="boom"), tower_build():  # without undo
        c = v1.get_variable("c", [2])
        raise KeyError("boom")
    assert c in v1.global_variables()

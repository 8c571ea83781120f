"""Variables of towers are matched by name where possible, else by position."""

# Private import: pure functions on names, tested without TensorFlow's variables.

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_core._records.matching import variable_mismatches
from tw_core._records.origins import base_names
from tw_core.internal import repeated_variables


@dataclass(eq=False)
class Named:
    """A stand-in for a variable."""

    name: str


ADVICE = (
    "only the numbers that Keras gives to unnamed layers differ: give each layer the "
    "same name in every tower, e.g. Dense(4, name='hidden')"
)


def mismatches(towers):
    return variable_mismatches(towers, [base_names(tower) for tower in towers])


def lists(*names):
    return [[Named(name) for name in tower] for tower in names]


MATCHING = {
    "replicas of a session graph": [["a:0", "b:0"], ["tower1/a:0", "tower1/b:0"]],
    "one name for all": [["w:0", "w:0"], ["w:0", "w:0"]],
    "keras numbers": [["dense/w", "dense_1/w"], ["dense_2/w", "dense_3/w"]],
    "named by the user": [["model0/w", "model0/b"], ["model1/w", "model1/b"]],
    "nothing in common": [["left/w", "left/b"], ["right/v", "right/c"]],
    "one tower": [["a", "b"]],
}
DIFFERENT = {
    "missing": (
        [["a", "b", "c"], ["tower1/a"], [f"tower2/{n}" for n in "abcd"]],
        "b is missing from towers [1], while towers [0, 2] have it",
        "c is missing from towers [1], while towers [0, 2] have it",
        "d is missing from towers [0, 1], while towers [2] have it",
    ),
    "all": ([["a"], []], "a is missing from towers [1], while towers [0] have it"),
    "numbered on by Keras": (
        [
            ["tower0/dense/w", "tower0/dense_1/w", "tower0/out/w"],
            ["tower1/dense_2/w", "tower1/dense_3/w", "tower1/out/w"],
        ],
        "dense/w is called dense_2/w in tower 1",
        "dense_1/w is called dense_3/w in tower 1",
        ADVICE,
    ),
    "numbered in another order": (
        [["layer_1/w", "layer_2/w"], ["layer_2/w", "layer_1/w"]],
        "tower 1 has the order ['layer_2/w', 'layer_1/w'], "
        "tower 0 ['layer_1/w', 'layer_2/w']",
    ),
    "without its number": (
        [["dense/kernel", "dense/bias"], ["dense_1/kernel"]],
        "dense/bias is missing from towers [1], while towers [0] have it",
    ),
    "less often": (
        [["dense/kernel", "dense_1/kernel"], ["dense_2/kernel"]],
        "dense/kernel occurs [2, 1] times in towers 0..1",
    ),
    "nothing in common": (
        [["left/w", "left/b"], ["right/v"]],
        "towers 0..1 have [2, 1] variables: [['left/w', 'left/b'], ['right/v']]",
    ),
}


def test_towers_match_or_every_difference_is_told():
    for names in MATCHING.values():
        assert mismatches(lists(*names)) == []
    for names, *told in DIFFERENT.values():
        assert mismatches(lists(*names)) == told


def test_shared_variables_are_told_by_name_in_any_number_and_order():
    a, b, c = Named("a"), Named("layer_1/b"), Named("layer_2/b")
    told = ["layer_1/b is called layer_2/b in tower 1", ADVICE]
    assert mismatches([[a, b], [a, c]]) == told
    a, b, c = Named("a"), Named("b"), Named("c")
    assert mismatches([[a, b, c], [a, b, c], [c, a, b], [b, a]]) == [
        "c is missing from towers [3], while towers [0, 1, 2] have it",
        "tower 2 has the order ['c', 'a', 'b'], tower 0 ['a', 'b', 'c']",
    ]


names = st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)


@given(names, st.data())
def test_replicas_match_and_a_variable_left_out_is_always_named(names, data):
    lost = data.draw(st.sampled_from(names))
    k = data.draw(st.integers(1, 2))
    towers = [[f"tower{i}/{n}" if i else n for n in names] for i in range(3)]
    assert mismatches(lists(*towers)) == []
    towers[k].remove(f"tower{k}/{lost}")
    (problem,) = mismatches(lists(*towers))
    assert problem.startswith(f"{lost} is missing from towers [{k}]")


@given(st.permutations("abcd"))
def test_every_other_order_is_found(order):
    towers = [list("abcd"), [f"tower1/{n}" for n in order]]
    assert bool(mismatches(lists(*towers))) == (list(order) != list("abcd"))


def test_a_variable_is_repeated_under_keras_too():
    held = keras.Variable(np.zeros(2), name="held")
    first, other = tf.Variable(0.0), tf.Variable(1.0)
    assert repeated_variables([held, other, first, held.value, first]) == [held, first]
    assert repeated_variables([first, other, held]) == []
    assert repeated_variables([]) == []

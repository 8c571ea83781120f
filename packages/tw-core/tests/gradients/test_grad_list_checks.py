"""Towers that bring different gradients are refused, and every offender named."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_core import merge_grad_list, split_grad_list
from tw_core.gradients import (
    check_grad_list,
    check_replicated_grad_list,
    check_shared_grad_list,
)

v1 = tf.compat.v1
MODES = pytest.mark.parametrize("mode", ["graph", "function", "eager"])
ADVICE = (
    "the loss does not depend on it; leave the variable out, or fill in zeros, "
    "everywhere"
)
HALF = tf.float16


def in_mode(mode, body):
    """Runs ``body`` while a graph is built, while a function is traced, or eagerly."""
    if mode == "graph":
        with tf.Graph().as_default():
            body()
    elif mode == "function":
        tf.compat.v1.wrap_function(body, [])
    else:
        body()


def variable(name, shape=(2,), dtype=np.float32):
    return tf.Variable(np.zeros(shape, dtype), name=name)


def tower(prefix="", names="ab"):
    pairs = []
    for name in names:
        v = variable(prefix + name)
        pairs.append((tf.zeros_like(v), v))
    return pairs


def slices(rows, width, dense_shape=None):
    values, indices = tf.zeros([rows, width]), tf.zeros([rows], tf.int64)
    return tf.IndexedSlices(values, indices, dense_shape)


def alone(*grads, of):
    """Towers with a gradient each, for one variable."""
    return [[(grad, of)] for grad in grads]


def problems(grad_list, *, check=check_grad_list, **kwargs):
    """Returns the offenders that the message lists."""
    with pytest.raises(ValueError) as error:
        check(grad_list, **kwargs)
    first, *listed = str(error.value).split("\n  - ")
    assert first.endswith(
        "with the same variables, shapes and dtypes in the same order; got:"
    )
    return listed


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")))))
def test_splitting_keeps_towers_and_order_and_merging_undoes_it(pairs):
    grads, variables = split_grad_list(pairs)
    assert grads == [[g for g, _ in tower] for tower in pairs]
    assert variables == [[v for _, v in tower] for tower in pairs]
    assert merge_grad_list(grads, variables) == pairs


# What passes.


def of_keras_models():
    def model():
        layers = [keras.layers.Dense(2), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input([3]), *layers]).trainable_variables

    return [[(tf.zeros(v.shape), v) for v in model()] for _ in "ab"]


PASS = {
    "replicas": lambda: [tower(f"tower{k}/" if k else "") for k in range(4)],
    "shared": lambda: [tower()] * 2,
    "tuples": lambda: (tuple(map(tuple, tower())), list(map(list, tower("tower1/")))),
    "rows": lambda: alone(*(slices(n, 2) for n in (0, 7)), of=variable("a", (5, 2))),
    "rows of a known shape": lambda: alone(
        *(slices(n, 2, [5, 2]) for n in (0, 1, 7)), of=variable("a", (5, 2))
    ),
    "scalars": lambda: alone(tf.constant(1.0), tf.constant(2.0), of=variable("a", ())),
    "halves": lambda: alone(*[tf.zeros([2], HALF)] * 2, of=variable("a")),
    **{
        dtype.__name__: lambda own=dtype: alone(
            tf.zeros([2], own), of=variable("a", dtype=own)
        )
        for dtype in (np.complex64, np.int32, np.float64)
    },
}


def of_own_and_shared_variables():
    check_replicated_grad_list([tower(), tower("tower1/")])
    check_shared_grad_list([tower()] * 2)
    for check in (check_replicated_grad_list, check_shared_grad_list):
        check([tower()])


def with_none_where_it_may():
    grad, a = tower()[0]
    for grads in ((None, grad), (grad, None), (None, None)):
        check_grad_list(alone(*grads, of=a), allow_none=True)


@MODES
def test_what_agrees_passes(mode):
    for make in PASS.values():
        in_mode(mode, lambda own=make: check_grad_list(own()))
    in_mode(mode, of_own_and_shared_variables)
    in_mode(mode, with_none_where_it_may)


def test_keras_models_built_apart_pass():
    pairs = of_keras_models()
    check_grad_list(pairs)
    tf.function(lambda: check_grad_list(pairs), autograph=False)()  # eager gradients


def test_shapes_that_are_not_known_pass(graph):
    unknown = v1.placeholder(tf.float32, None)
    partly = v1.placeholder(tf.float32, [None, 2])
    rows = tf.IndexedSlices(unknown, v1.placeholder(tf.int32, None))
    check_grad_list(
        alone(unknown, partly, rows, tf.zeros([5, 2]), of=variable("w", (5, 2)))
    )
    w = tf.Variable(tf.zeros([2]), shape=tf.TensorShape(None))
    check_grad_list(alone(tf.zeros([2]), unknown, tf.zeros([2]), of=w))


def test_gradients_of_the_graph_around_a_body_pass(graph):
    pairs = tower()

    def body():
        check_grad_list([pairs])
        return tf.constant(0)

    tf.cond(tf.constant(True), body, lambda: tf.cond(tf.constant(1) > 0, body, body))


# What is refused.


def without_and_with_another():
    return [tower(), tower("tower1/", "ac"), tower("tower2/", "a")]


def of_other_shapes():
    a, b, c = variable("a"), variable("b", (5, 2)), variable("c", ())
    good = [(tf.zeros([2]), a), (slices(3, 2), b), (tf.zeros([]), c)]
    return [good, [(tf.zeros([3]), a), (slices(3, 4), b), (tf.zeros([1]), c)]]


def of_other_dtypes():
    a, b, half = variable("a"), variable("b"), tf.zeros([2], HALF)
    return [[(tf.zeros([2]), a), (half, b)], [(half, a), (half, b)]]


def with_none():
    (grad, a), (_, b) = tower()
    return [[(grad, a), (None, b)], [(None, a), (None, b)]]


def of_another_number_of_rows():
    grads = (slices(3, 2, tf.constant([rows, 2])) for rows in (5, 6))
    return alone(*grads, of=variable("a", (5, 2)))


def with_none_and_another_shape():
    (_, a), (_, b) = tower()
    return [[(None, a), (tf.zeros([3]), b)]]


SHAPED = "has gradients of shapes"
REFUSED = [
    (
        without_and_with_another,
        "b is missing from towers [1, 2], while towers [0] have it",
        "c is missing from towers [0, 2], while towers [1] have it",
    ),
    (
        lambda: [pairs := tower(), pairs[::-1]],
        "tower 1 has the order ['b', 'a'], tower 0 ['a', 'b']",
    ),
    (
        with_none,
        f"b has gradient None in towers [0, 1]: {ADVICE}",
        f"a has gradient None in towers [1]: {ADVICE}",
    ),
    (
        with_none_and_another_shape,
        f"a has gradient None in towers [0]: {ADVICE}",
        f"b, of shape (2,), {SHAPED} ['(3,)'] in towers 0..0",
    ),
    (
        of_other_shapes,
        f"a, of shape (2,), {SHAPED} ['(2,)', '(3,)'] in towers 0..1",
        f"b, of shape (5, 2), {SHAPED} ['(5, 2)', '(5, 4)'] in towers 0..1",
        f"c, of shape (), {SHAPED} ['()', '(1,)'] in towers 0..1",
    ),
    (
        of_another_number_of_rows,
        f"a, of shape (5, 2), {SHAPED} ['(5, 2)', '(6, 2)'] in towers 0..1",
    ),
    (
        of_other_dtypes,
        "a has gradients of dtypes ['float32', 'float16'] in towers 0..1",
    ),
    *(
        (
            lambda own=values: alone(tf.constant(own), of=variable("a")),
            f"a, of dtype float32, has gradients of dtypes ['{name}'] in towers 0..0",
        )
        for values, name in [
            ([True, False], "bool"),
            (["a", "b"], "string"),
            ([1j, 2j], "complex128"),
        ]
    ),
    (
        lambda: [
            [(tf.zeros([2], d), variable("a", dtype=d))]
            for d in (np.float32, np.float64)
        ],
        "a has dtypes ['float32', 'float64'] in towers 0..1",
    ),
]


@MODES
def test_every_difference_is_named_with_its_towers(mode):
    for make, *wanted in REFUSED:

        def body(make=make, wanted=wanted):
            assert sorted(problems(make())) == sorted(wanted)

        in_mode(mode, body)


@MODES
def test_every_variable_is_named_that_towers_share_or_do_not(mode):
    def body():
        first, copies = tower(names="abc"), tower("tower1/", names="abc")
        pairs = [first, copies, [first[0], copies[1], first[2]]]
        found = problems(pairs, check=check_replicated_grad_list)
        assert [line.partition(", and would")[0] for line in found] == [
            "a:0 is one variable in towers [0, 2]",
            "c:0 is one variable in towers [0, 2]",
            "tower1/b:0 is one variable in towers [1, 2]",
        ]
        assert problems([first, copies, copies], check=check_shared_grad_list) == [
            f"{name} is a separate variable in towers [1, 2]; all towers must use "
            "tower 0's"
            for name in "abc"
        ]

    in_mode(mode, body)


PARTLY_KNOWN = {
    "length": ((None,), [(None,), (3,), (4,)]),
    "tower 0 known": ((None,), [(3,), (None,), (4,)]),
    "rank": (None, [None, (3,), (3, 1)]),
    "of two": ((None, None), [(2, None), (None, 3), (4, 3)]),
    "the variable": ((2, None), [(None, 3), (None, 4)]),
}


@pytest.mark.parametrize(("own", "shapes"), PARTLY_KNOWN.values(), ids=PARTLY_KNOWN)
def test_shapes_known_in_part_are_compared_tower_with_tower(graph, own, shapes):
    placeholder = partial(v1.placeholder, tf.float32)
    w = tf.Variable(placeholder(own), shape=tf.TensorShape(own), name="w")
    listed = [str(tf.TensorShape(shape)) for shape in shapes]
    assert problems(alone(*map(placeholder, shapes), of=w)) == [
        f"w, of shape {tf.TensorShape(own)}, {SHAPED} {listed} "
        f"in towers 0..{len(shapes) - 1}"
    ]


def test_replicas_of_other_shapes_are_named_where_gradients_have_none(graph):
    unknown = v1.placeholder(tf.float32, None)
    pairs = [[(unknown, variable("w", shape))] for shape in [(2, 3), (3, 2)]]
    assert problems(pairs) == ["w has shapes ['(2, 3)', '(3, 2)'] in towers 0..1"]


def test_gradients_and_variables_of_another_graph_are_named():
    with tf.Graph().as_default():
        (grad, w), (other, b) = tower(names="wb")
    with tf.Graph().as_default():
        (mine, own), _ = tower(names="xy")
        advice = "build all of a step in one graph"
        assert problems([[(grad, own), (mine, w)], [(mine, own), (other, b)]]) == [
            f"x or its gradient belongs to another graph in towers [0]; {advice}",
            f"w or its gradient belongs to another graph in towers [0]; {advice}",
            f"b or its gradient belongs to another graph in towers [1]; {advice}",
            "w is missing from towers [1], while towers [0] have it",
            "b is missing from towers [0], while towers [1] have it",
        ]


def test_what_is_no_pair_is_refused_by_its_place():
    good = tower()
    for pair in (1.0, "w"), ("g", tf.Variable(0.0)), (None,), "gv", (None,) * 3, 3:
        with pytest.raises(TypeError, match=r"pairs of a .* else at tower 1 item 1.$"):
            check_grad_list([good, [good[0], pair]])
    for none in ([[]], [[], []]):
        with pytest.raises(ValueError, match=f"No gradient at all, from {len(none)} t"):
            check_grad_list(none)

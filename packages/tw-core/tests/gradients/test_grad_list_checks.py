"""Towers that bring different gradients are refused, and every offender named."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core.gradients import (
    check_grad_list,
    check_replicated_grad_list,
    check_shared_grad_list,
)

v1 = tf.compat.v1
MODES = pytest.mark.parametrize("mode", ["graph", "function", "eager"])


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


def problems(grad_list, *, check=check_grad_list, **kwargs):
    """Returns the offenders that the message lists."""
    with pytest.raises(ValueError) as error:
        check(grad_list, **kwargs)
    first, *listed = str(error.value).split("\n  - ")
    assert first.endswith(
        "with the same variables, shapes and dtypes in the same order; got:"
    )
    return listed


# What passes.


@MODES
@pytest.mark.parametrize("num_towers", [1, 2, 4])
def test_replicas_pass(mode, num_towers):
    in_mode(
        mode,
        lambda: check_grad_list(
            [tower(f"tower{k}/" if k else "") for k in range(num_towers)]
        ),
    )


@MODES
def test_shared_variables_pass(mode):
    def body():
        pairs = tower()
        check_grad_list([pairs, [(tf.ones_like(g), v) for g, v in pairs]])

    in_mode(mode, body)


def test_lists_of_lists_and_tuples_of_tuples_pass():
    pairs = tower()
    check_grad_list((tuple(pairs), [list(pair) for pair in pairs]))


def test_keras_models_built_apart_pass():
    models = [
        keras.Sequential(
            [keras.Input([3]), keras.layers.Dense(2), keras.layers.Dense(2)]
        )
        for _ in "ab"
    ]
    check_grad_list(
        [[(tf.zeros(v.shape), v) for v in m.trainable_variables] for m in models]
    )


def slices(rows, width, dense_shape=None):
    return tf.IndexedSlices(
        tf.zeros([rows, width]), tf.zeros([rows], tf.int64), dense_shape
    )


@MODES
@pytest.mark.parametrize("dense_shape", [None, [5, 2]])
def test_sparse_gradients_pass_with_any_number_of_rows(mode, dense_shape):
    def body():
        table = variable("table", (5, 2))
        pairs = [[(slices(rows, 2, dense_shape), table)] for rows in (0, 1, 7)]
        check_grad_list(pairs)

    in_mode(mode, body)


def test_shapes_that_are_not_known_pass(graph):
    w = variable("w", (5, 2))
    unknown = v1.placeholder(tf.float32, None)
    partly = v1.placeholder(tf.float32, [None, 2])
    rows = tf.IndexedSlices(unknown, v1.placeholder(tf.int32, None))
    check_grad_list([[(g, w)] for g in (unknown, partly, rows, tf.zeros([5, 2]))])


def test_a_variable_of_unknown_shape_passes(graph):
    w = tf.Variable(tf.zeros([2]), shape=tf.TensorShape(None))
    unknown = v1.placeholder(tf.float32, None)
    check_grad_list([[(tf.zeros([2]), w)], [(unknown, w)], [(tf.zeros([2]), w)]])


def test_scalars_pass():
    step = variable("step", ())
    check_grad_list([[(tf.constant(1.0), step)], [(tf.constant(2.0), step)]])


def test_a_gradient_may_have_another_dtype_than_its_variable():
    w = variable("w")
    check_grad_list([[(tf.zeros([2], tf.float16), w)]] * 2)


@pytest.mark.parametrize("where", [[0], [1], [0, 1]])
def test_none_passes_where_it_is_allowed(where):
    w = variable("w")
    pairs = [[(None if k in where else tf.zeros([2]), w)] for k in range(2)]
    check_grad_list(pairs, allow_none=True)


@MODES
def test_variables_of_their_own_and_shared_ones_pass_where_they_are_wanted(mode):
    def body():
        own, shared = [tower(), tower("tower1/")], [tower()] * 2
        check_replicated_grad_list(own)
        check_shared_grad_list(shared)
        check_replicated_grad_list(shared[:1])
        check_shared_grad_list(shared[:1])

    in_mode(mode, body)


# What is refused.


@MODES
def test_every_shared_variable_is_named_where_each_tower_must_have_its_own(mode):
    def body():
        (one, a), (two, b), (three, c) = tower(names="abc")
        copies = tower("tower1/", names="abc")
        pairs = [
            [(one, a), (two, b), (three, c)],
            copies,
            [(one, a), copies[1], (three, c)],
        ]
        found = problems(pairs, check=check_replicated_grad_list)
        assert [line.partition(", and would")[0] for line in found] == [
            "a:0 is one variable in towers [0, 2]",
            "c:0 is one variable in towers [0, 2]",
            "tower1/b:0 is one variable in towers [1, 2]",
        ]

    in_mode(mode, body)


@MODES
def test_every_variable_that_is_not_shared_is_named_where_it_must_be(mode):
    def body():
        (one, a), (two, b) = tower()
        copy = tower("tower1/")
        pairs = [[(one, a), (two, b)], copy, copy]
        assert problems(pairs, check=check_shared_grad_list) == [
            f"{name} is a variable of their own in towers [1, 2], where all towers "
            "must use tower 0's"
            for name in "ab"
        ]

    in_mode(mode, body)


@MODES
def test_every_missing_and_extra_variable_is_named(mode):
    def body():
        grad_list = [tower(), tower("tower1/", "ac"), tower("tower2/", "a")]
        assert problems(grad_list) == [
            "b is missing from towers [1, 2], while towers [0] have it",
            "c is missing from towers [0, 2], while towers [1] have it",
        ]

    in_mode(mode, body)


def test_another_order_is_named():
    pairs = tower()
    (problem,) = problems([pairs, pairs[::-1]])
    assert problem == "tower 1 has the order ['b', 'a'], tower 0 ['a', 'b']"


@MODES
def test_every_none_is_named_with_its_towers(mode):
    def body():
        (ga, a), (_, b) = tower()
        advice = (
            "the loss does not depend on it; leave the variable out, or fill in zeros, "
            "everywhere"
        )
        assert problems([[(ga, a), (None, b)], [(None, a), (None, b)]]) == [
            f"b has gradient None in towers [0, 1]: {advice}",
            f"a has gradient None in towers [1]: {advice}",
        ]

    in_mode(mode, body)


@MODES
def test_every_other_shape_is_named_with_all_towers_shapes(mode):
    def body():
        a, b, c = variable("a"), variable("b", (5, 2)), variable("c", ())
        good = [(tf.zeros([2]), a), (slices(3, 2), b), (tf.zeros([]), c)]
        bad = [(tf.zeros([3]), a), (slices(3, 4), b), (tf.zeros([1]), c)]
        assert problems([good, bad]) == [
            "a, of shape (2,), has gradients of shapes ['(2,)', '(3,)'] in towers 0..1",
            "b, of shape (5, 2), has gradients of shapes ['(5, 2)', '(5, 4)'] in "
            "towers 0..1",
            "c, of shape (), has gradients of shapes ['()', '(1,)'] in towers 0..1",
        ]

    in_mode(mode, body)


PARTLY_KNOWN = {
    "length": ((None,), [(None,), (3,), (4,)]),
    "tower 0 known": ((None,), [(3,), (None,), (4,)]),
    "rank": (None, [None, (3,), (3, 1)]),
    "of two": ((None, None), [(2, None), (None, 3), (4, 3)]),
    "the variable": ((2, None), [(None, 3), (None, 4)]),
}


@pytest.mark.parametrize(
    ("own", "shapes"), PARTLY_KNOWN.values(), ids=PARTLY_KNOWN.keys()
)
def test_shapes_known_in_part_are_compared_tower_with_tower(graph, own, shapes):
    w = tf.Variable(
        v1.placeholder(tf.float32, own), shape=tf.TensorShape(own), name="w"
    )
    pairs = [[(v1.placeholder(tf.float32, shape), w)] for shape in shapes]
    (problem,) = problems(pairs)
    listed = [str(tf.TensorShape(shape)) for shape in shapes]
    assert problem == (
        f"w, of shape {tf.TensorShape(own)}, has gradients of shapes {listed} "
        f"in towers 0..{len(shapes) - 1}"
    )


def test_replicas_of_other_shapes_are_named_where_gradients_have_none(graph):
    unknown = v1.placeholder(tf.float32, None)
    pairs = [[(unknown, variable("w", shape))] for shape in [(2, 3), (3, 2)]]
    assert problems(pairs) == ["w has shapes ['(2, 3)', '(3, 2)'] in towers 0..1"]


@MODES
def test_sparse_gradients_for_another_number_of_rows_are_named(mode):
    def body():
        table = variable("table", (5, 2))
        pairs = [[(slices(3, 2, tf.constant([rows, 2])), table)] for rows in (5, 6)]
        assert problems(pairs) == [
            "table, of shape (5, 2), has gradients of shapes ['(5, 2)', '(6, 2)'] in "
            "towers 0..1"
        ]

    in_mode(mode, body)


def test_one_towers_gradient_of_another_shape_than_its_variable_is_named():
    w = variable("w")
    assert problems([[(tf.zeros([3]), w)]]) == [
        "w, of shape (2,), has gradients of shapes ['(3,)'] in towers 0..0"
    ]


@MODES
def test_every_other_dtype_is_named(mode):
    def body():
        a, b = variable("a"), variable("b")
        half = tf.zeros([2], tf.float16)
        assert problems([[(tf.zeros([2]), a), (half, b)], [(half, a), (half, b)]]) == [
            "a has gradients of dtypes ['float32', 'float16'] in towers 0..1"
        ]

    in_mode(mode, body)


@pytest.mark.parametrize("values", [[True, False], ["a", "b"], [1j, 2j]])
@MODES
def test_gradients_that_cannot_update_their_variable_are_named(mode, values):
    def body():
        grad, w = tf.constant(values), variable("w")
        dtype = grad.dtype.name
        assert problems([[(grad, w)]]) == [
            f"w, of dtype float32, has gradients of dtypes {[dtype]} in towers 0..0"
        ]

    in_mode(mode, body)


def test_complex_gradients_of_complex_variables_and_whole_numbers_pass():
    for dtype in (np.complex64, np.int32, np.float64):
        w = variable("w", dtype=dtype)
        check_grad_list([[(tf.zeros([2], dtype), w)]])


def test_gradients_and_variables_of_another_graph_are_named():
    with tf.Graph().as_default():
        (grad, w), (other, b) = tower(names="wb")
    with tf.Graph().as_default():
        (mine, own), _ = tower(names="xy")
        advice = "build all of a step in one graph"
        assert problems([[(grad, own), (mine, w)], [(mine, own), (other, b)]]) == [
            f"x or its gradient is of another graph in towers [0]; {advice}",
            f"w or its gradient is of another graph in towers [0]; {advice}",
            f"b or its gradient is of another graph in towers [1]; {advice}",
            "w is missing from towers [1], while towers [0] have it",
            "b is missing from towers [0], while towers [1] have it",
        ]


def test_gradients_of_the_graph_around_a_branch_pass(graph):
    pairs = tower()

    def branch():
        check_grad_list([pairs])
        return tf.constant(0)

    tf.cond(
        tf.constant(True), branch, lambda: tf.cond(tf.constant(1) > 0, branch, branch)
    )


def test_eager_gradients_pass_in_a_function():
    pairs = tower()

    @tf.function(autograph=False)
    def traced():
        check_grad_list([pairs])

    traced()


def test_replicas_of_another_dtype_are_named_once():
    pairs = [
        [(tf.zeros([2], d), variable("w", dtype=d))] for d in (np.float32, np.float64)
    ]
    assert problems(pairs) == ["w has dtypes ['float32', 'float64'] in towers 0..1"]


def test_none_and_shapes_are_named_together():
    (_, a), (_, b) = tower()
    assert len(problems([[(None, a), (tf.zeros([3]), b)]])) == 2


def test_reference_variables_are_named(graph, reference_variables):
    a, b = v1.get_variable("a", [2]), v1.get_variable("b", [2])
    zeros = tf.zeros([2])
    first, second = problems([[(zeros, a), (zeros, b)]] * 2)
    assert first.startswith("a:0 is a reference variable; only resource variables are")
    assert second.startswith("b:0 is a reference variable")


def test_one_towers_pairs_without_a_list_around_them_are_refused():
    with pytest.raises(
        TypeError, match="got something else at tower 0 item 0, tower 0 it"
    ):
        check_grad_list(tower())


@pytest.mark.parametrize(
    "pair", [(1.0, "w"), ("g", tf.Variable(0.0)), (None,), "gv", (None, None, None), 3]
)
def test_what_is_no_pair_is_refused_by_its_place(pair):
    good = tower()
    with pytest.raises(
        TypeError, match=r"must hold pairs of a .* else at tower 1 item 1.$"
    ):
        check_grad_list([good, [good[0], pair]])


@pytest.mark.parametrize("grad_list", [[], [[]], [[], []]])
def test_no_gradient_at_all_is_refused(grad_list):
    want = f"No gradient at all, from {len(grad_list)} towers; a tower function returns"
    with pytest.raises(ValueError, match=want):
        check_grad_list(grad_list)

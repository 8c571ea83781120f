"""Gradients that are not their variables', known while building or only then."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_ampopt import Optimizer, TowerOptimizer
from tw_core.testing import CPUS

v1 = tf.compat.v1
SGD = {"tf_optimizer": "tf.train.GradientDescentOptimizer", "learning_rate": 1.0}
SHAPES = {"a": (6,), "b": (2,), "table": (5, 3), "large": (129, 130)}


def make_variables():
    return [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]


def good_feeds():
    """Dense ones, and rows and indices of the table."""
    rows = np.float32([[1, 2, 3], [4, 5, 6]])
    return [np.ones(6), np.ones(2), rows, np.int64([4, 1]), np.ones((129, 130))]


def as_gradients(feeds, *, dense_shape=None):
    a, b, rows, places, large = feeds
    return [a, b, tf.IndexedSlices(rows, places, dense_shape), large]


KINDS = [
    (1, tf.float32),
    (1, tf.float32),
    (2, tf.float32),
    (1, tf.int64),
    (2, tf.float32),
]


def unknown(rank, make):
    return [make(None if rank is None else [None] * r, dtype) for r, dtype in KINDS]


def in_function(rank, num_towers=1, **arguments):
    """Towers' steps of a ``TowerOptimizer``, fed with shapes that are not known."""
    lists = []
    for k in range(num_towers):
        with tf.device(CPUS[k]):
            lists.append(make_variables())
    optimizer = TowerOptimizer(lists, **(SGD | arguments))

    @tf.function(input_signature=[[unknown(rank, tf.TensorSpec)] * num_towers])
    def apply(towers):
        return optimizer.apply([as_gradients(feeds) for feeds in towers])

    def step(*towers):
        dtypes = [dtype for _, dtype in KINDS]
        apply([list(map(tf.constant, feeds, dtypes)) for feeds in towers])

    return step, lambda: [v.numpy() for v in lists[0]]


def in_graph(rank, *, accumulation_steps=None, **arguments):
    """The same by ``Optimizer.apply_gradients``, of one tower."""
    arguments["minibatch_multiplier"] = accumulation_steps
    with tf.Graph().as_default() as graph:
        variables = make_variables()
        places = unknown(rank, lambda shape, dtype: v1.placeholder(dtype, shape))
        optimizer = Optimizer(**(SGD | arguments))
        pairs = zip(as_gradients(places), variables, strict=True)
        train = optimizer.apply_gradients(list(pairs))
        session = v1.Session(graph=graph)
        session.run(v1.global_variables_initializer())

    def step(feeds):
        session.run(train, dict(zip(places, feeds, strict=True)))

    return step, lambda: session.run(variables)


each_mode = pytest.mark.parametrize("make", [in_graph, in_function])


def with_feeds(**changed):
    places = ["a", "b", "rows", "places", "large"]
    return [
        changed.get(name, feed) for name, feed in zip(places, good_feeds(), strict=True)
    ]


@pytest.mark.parametrize("multiplier", [None, 2])
@pytest.mark.parametrize("rank", ["known", None], ids=["rank", "no rank"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        # As many elements together as there should be.
        (
            with_feeds(a=np.ones(5), b=np.ones(3)),
            r"check_gradient_shape/tower0/[ab].*\[[53]\] is not .* shape \[[62]\]",
        ),
        (
            with_feeds(large=np.ones((130, 129))),
            r"tower0/large.*\[130,129\] is not",
        ),
        (
            with_feeds(rows=np.ones((3, 2)), places=[0, 1, 2]),
            r"tower0/table.*\[3,2\] is not .* shape \[\?,3\]",
        ),
    ],
    ids=["packed", "alone", "rows"],
)
@each_mode
def test_a_shape_that_is_known_when_it_runs_is_compared_then(
    make, rank, multiplier, bad, message
):
    step, values = make(rank, accumulation_steps=multiplier)
    for _ in range(multiplier or 1):
        step(good_feeds())
    before = values()
    assert all(value.any() for value in before)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){message}"):
        step(bad)
    for got, want in zip(values(), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_tower_is_named():
    step, _ = in_function("known", 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"_shape/tower1/b"):
        step(good_feeds(), with_feeds(b=np.ones(4)))


@pytest.mark.parametrize(
    "kind", ["tf.train.AdamOptimizer", keras.optimizers.Adam, keras.optimizers.Adamax]
)
@pytest.mark.parametrize("multiplier", [None, 2])
@each_mode
def test_good_gradients_of_unknown_shape_train(make, kind, multiplier):
    # Of the table, neither Adam nor the accumulator can do without a dense shape.
    arguments = {"tf_optimizer": kind, "learning_rate": 0.5}
    step, values = make(None, accumulation_steps=multiplier, **arguments)
    for _ in range(multiplier or 1):
        step(good_feeds())
    a, b, table, large = values()
    for value in (a, b, large, table[[1, 4]]):
        np.testing.assert_allclose(value, -0.5, rtol=1e-4)
    np.testing.assert_array_equal(table[[0, 2, 3]], 0)


def test_what_is_known_while_building_is_refused_then_with_all_names():
    grads = as_gradients(with_feeds(a=tf.ones(5), b=tf.ones(3)))
    with pytest.raises(
        ValueError,
        match=r"a:0 \(6,\) has a gradient of shape \(5,\) in tower 0; b:0 \(2,\) has",
    ):
        TowerOptimizer(make_variables()).apply([grads])
    with pytest.raises(TypeError, match=r"got 'a' for a:0 in tower 0; \[1.0\] for b"):
        TowerOptimizer(make_variables()).apply([["a", [1.0], None, None]])


def test_a_scalar_has_no_rows():
    w = tf.Variable(1.0, name="w")
    grad = tf.IndexedSlices(tf.ones(1), tf.constant([0]))
    with pytest.raises(ValueError, match=r"w:0 \(\) has a gradient of shape"):
        TowerOptimizer([w]).apply([grad])

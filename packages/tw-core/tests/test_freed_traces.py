"""A trace is freed with its function, and its gradients with it."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry  # noqa: TID251

from tw_core import map_towers, towers
from tw_core.flat_variables import FlatVariables, flatten
from tw_core.internal import with_gradient
from tw_core.synchronized import moments_over_towers
from tw_core.testing import CPUS, run_eagerly, run_in_function, run_in_graph

v1 = tf.compat.v1
X = np.arange(12.0).reshape(4, 3)


def of_a_flat_model():
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = tf.Variable(X[0]), tf.Variable(0.5, dtype=tf.float64)

        def __call__(self, x):
            return tf.reduce_sum(self.w * x + self.b)

    model = flatten(Model)

    def step():
        with tf.GradientTape() as tape:
            loss = model(X)
        return tape.gradient(loss, model.trainable_variables)

    return step


def of_flat_get_variable_code():
    def step():
        flat = FlatVariables()
        with flat.scope():
            w = v1.get_variable("w", initializer=X[0])
        return tf.gradients(tf.reduce_sum(w.read_value() * X), [w])

    return step


def of_sums_over_towers():
    def one(_, x):
        x = tf.constant(x)
        mean, variance = moments_over_towers(x, [0])
        [first] = tf.gradients(tf.reduce_sum((x - mean) ** 3 / variance), [x])
        return tf.gradients(tf.reduce_sum(first**2), [x])

    return lambda: map_towers(one, towers(list(CPUS[:2])), [X, X**2])


PROGRAMS = {
    "a flat model, function": (of_a_flat_model, run_in_function),
    "flat get_variable code, graph": (of_flat_get_variable_code, run_in_graph),
    "sums and their gradients, graph": (of_sums_over_towers, run_in_graph),
    "sums and their gradients, function": (of_sums_over_towers, run_in_function),
}


@pytest.mark.parametrize(("make", "run"), PROGRAMS.values(), ids=PROGRAMS)
def test_traces_are_freed_and_leave_the_registry_as_it_was(make, run):
    step, graphs = make(), []

    def built():
        result = step()
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return result

    before = set(gradient_registry.list())
    for _ in range(3):
        run(built)
    gc.collect()
    assert [graph() for graph in graphs] == [None, None, None]
    assert set(gradient_registry.list()) == before


@pytest.mark.parametrize("run", [run_in_graph, run_in_function, run_eagerly])
@pytest.mark.parametrize("how", ["tape", "gradients"])
def test_a_gradient_is_the_one_that_was_given(run, how):
    if how == "gradients" and run is run_eagerly:
        run = run_in_function  # no tf.gradients in eager mode

    def twice_and_loss(x):
        twice, thrice = with_gradient(
            [2 * tf.stop_gradient(x), 3 * tf.stop_gradient(x)],
            [x],
            lambda to_twice, to_thrice: [(10 * to_twice + 100 * to_thrice) * x],
        )
        return twice, twice + 2 * thrice

    def differentiated(fn, x):
        """Returns the first of what ``fn`` returns, and the gradient of the second."""
        if how == "gradients":
            first, loss = fn(x)
            return first, tf.gradients(loss, x)[0]
        with tf.GradientTape() as tape:
            tape.watch(x)
            first, loss = fn(x)
        return first, tape.gradient(loss, x)

    def once(x):
        return (own := differentiated(twice_and_loss, x)), own[1]

    (twice, first), second = run(lambda x: differentiated(once, x), X)
    np.testing.assert_array_equal(twice, 2 * X)
    np.testing.assert_array_equal(first, 210 * X)
    np.testing.assert_array_equal(second, np.full(X.shape, 210.0))


def test_a_gradient_is_kept_in_bodies_and_called_functions():
    def fivefold(x):
        return with_gradient([tf.identity(x)], [x], lambda dy: [5 * dy])[0]

    @tf.function(autograph=False)
    def body(x):
        branch = tf.cond(x > 0, lambda: fivefold(x), lambda: x)
        looped = tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, fivefold(y)), (0, x)
        )
        return branch + looped[1]

    x = tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = body(x)
    assert tape.gradient(y, x) == 5 + 25

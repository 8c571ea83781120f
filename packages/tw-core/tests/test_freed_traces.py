"""A trace is freed with its function, and its gradients with it."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry  # noqa: TID251

from tw_core import map_towers, towers
from tw_core.flat_variables import FlatVariables, flatten
from tw_core.synchronized import moments_over_towers
from tw_core.testing import CPUS, run_in_function, run_in_graph

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

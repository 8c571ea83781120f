"""Sums of gradients in variables, beside NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tw_core.internal import add_to_sums, clear_sums, make_sums
from tw_core.testing import run_eagerly, run_in_function, run_in_graph

DENSE = np.array([1.5, -2.0, 0.25], np.float16)  # cast to the sum's dtype
ROWS, IDS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.array([3, 0, 3])


def after(done):
    return tf.control_dependencies([own for own in done if own is not None])


@pytest.mark.parametrize("run", [run_eagerly, run_in_function, run_in_graph])
@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_added_until_sums_are_cleared(run, factor, dtype):
    made = []

    def step(dense, rows):
        if not made:  # A function is traced twice, and may make variables once.
            made.extend(make_sums([tf.zeros([3], dtype), tf.zeros([4, 2], dtype)]))
        grads = [dense, tf.IndexedSlices(rows, tf.constant(IDS))]
        by = None if factor is None else tf.constant(factor, tf.float64)
        with after(add_to_sums(made, grads, by)), after(add_to_sums(made, grads, by)):
            twice = [own.read_value() for own in made]
        with after(twice), after(clear_sums(made)):
            return twice, [own.read_value() for own in made]

    twice, cleared = run(step, DENSE, ROWS.astype(dtype))
    of_rows = np.zeros([4, 2])
    np.add.at(of_rows, IDS, ROWS)
    by = 2.0 if factor is None else 2.0 * factor
    for got, want in zip(twice, [DENSE * by, of_rows * by], strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want)
    assert not any(map(np.any, cleared))

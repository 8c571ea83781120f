"""What is done to values is the same for a dense gradient and for a sparse one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core.internal import (
    check_any_gradient,
    map_values,
    power_of_two,
    scale,
    values_of,
    weigh,
    with_unique_rows,
)
from tw_core.testing import SparseRows, run_eagerly, run_in_function, run_in_graph

DENSE = np.array([[1, 2], [3, -4], [0, 8]], np.float32)
NAN = float("nan")
ROWS = SparseRows(
    np.array([[1, 2], [3, -4], [5, 6]], np.float32),
    np.array([2, 0, 2], np.int32),
    np.array([3, 2], np.int32),
)
each_mode = pytest.mark.parametrize("run", [run_eagerly, run_in_function, run_in_graph])
each_dtype = pytest.mark.parametrize(
    "dtype", [np.float16, tf.bfloat16.as_numpy_dtype, np.float32, np.float64]
)


@each_mode
@each_dtype
def test_gradients_are_scaled_as_numpy_does_it_and_keep_their_rows(run, dtype):
    rows = ROWS._replace(values=ROWS.values.astype(dtype))

    def scaled(dense, *sparse):
        factor = tf.constant(0.25)
        return (
            [scale(dense, 0.25), scale(dense, factor)],
            [scale(own, 0.25) for own in sparse],
            [map_values(tf.square, own) for own in (dense, sparse[0])],
        )

    dense = DENSE.astype(dtype)
    both, (known, unknown), squares = run(
        scaled, dense, rows, rows._replace(dense_shape=None)
    )
    for got in both:
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, dense * dtype(0.25))
    for got in (known, unknown):
        assert got.values.dtype == dtype
        np.testing.assert_array_equal(got.values, rows.values * dtype(0.25))
        np.testing.assert_array_equal(got.indices, rows.indices)
    np.testing.assert_array_equal(known.dense_shape, rows.dense_shape)
    assert unknown.dense_shape is None
    np.testing.assert_array_equal(squares[0], dense**2)
    np.testing.assert_array_equal(squares[1].values, rows.values**2)


def test_values_and_numbers_are_taken_as_they_are():
    dense, rows = tf.constant(DENSE), tf.constant(ROWS.values)
    slices = tf.IndexedSlices(rows, [2, 0, 2])
    for grad, values in ((dense, dense), (slices, rows)):
        assert values_of(grad) is values
        assert scale(grad, None) is grad
    # A number is rounded to the gradient's dtype only.
    assert scale(tf.constant(3.0, tf.float64), 1 / 3).numpy() == 3.0 * (1 / 3)


@each_mode
def test_only_sparse_gradients_have_rows_to_add(run):
    dense, sparse, none = run(
        lambda *g: [with_unique_rows(grad) for grad in g], DENSE, ROWS, None
    )
    np.testing.assert_array_equal(dense, DENSE)
    np.testing.assert_array_equal(sparse.indices, [2, 0])
    np.testing.assert_array_equal(sparse.to_dense(), ROWS.to_dense())
    assert none is None


def test_one_gradient_is_enough():
    variables = [tf.Variable(0.0, name="a"), keras.Variable(0.0, name="b")]
    check_any_gradient([None, tf.constant(0.0)], variables)
    check_any_gradient([None, tf.IndexedSlices([1.0], [0])], variables)
    says = r"^No gradient .*; got \['a:0', 'b'\]\. Does the loss"
    with pytest.raises(ValueError, match=says):
        check_any_gradient([None, None], variables)


@each_mode
def test_the_power_of_two_of_a_number_is_its_exponent(run):
    numbers = np.array([0, 0.3, 1, 1.5, 2, 3, 1e300, 2.0**-1000])
    wanted = np.append(0, 2.0 ** np.floor(np.log2(numbers[1:])))
    np.testing.assert_array_equal(run(power_of_two, numbers), wanted)


@each_mode
@each_dtype
def test_a_weight_of_0_gives_0_and_a_large_one_does_not_overflow(run, dtype):
    small = (DENSE / 1024).astype(dtype)

    def weighed(dense, values, indices, weight):
        sparse = tf.IndexedSlices(values, indices)
        return weigh(dense, weight), weigh(sparse, 65536.0), weigh(dense * NAN, 0)

    dense, sparse, nothing = run(
        weighed, small, small, np.arange(3), np.float64(65536.0)
    )
    np.testing.assert_array_equal(dense.astype(np.float64), 64 * DENSE)
    np.testing.assert_array_equal(sparse.values.astype(np.float64), 64 * DENSE)
    np.testing.assert_array_equal(nothing.astype(np.float64), 0 * DENSE)

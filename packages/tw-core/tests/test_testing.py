"""One function gives the same structure and values in every mode."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from tw_core.devices import canonical_device
from tw_core.testing import (
    CPUS,
    NUM_CPUS,
    SparseRows,
    run_eagerly,
    run_in_function,
    run_in_graph,
    start_logical_cpus,
)

RUNS = pytest.mark.parametrize("run", [run_in_graph, run_in_function, run_eagerly])


VALUES = [np.float16(2), np.float64(2), np.int8(2), np.bool_(True), np.zeros([0, 3])]


@RUNS
def test_arrays_become_tensors_and_tensors_arrays_at_any_depth(run):
    def fn(x, nested, n, name, nothing):
        assert tf.is_tensor(x)
        assert tf.is_tensor(nested["a"][1])
        assert (n, name, nothing) == (3, "w", None)  # are passed on
        with tf.device(CPUS[-1]):
            total = x + nested["a"][1]
        assert canonical_device(total.device) == f"/device:CPU:{NUM_CPUS - 1}"
        return {"sum": total, "list": [nested["a"][0] * n, (x, None)]}, nested["b"]

    nested = {"a": [5.0, np.int32(3)], "b": VALUES}
    got, same = run(fn, np.ones([2], np.int32), nested, 3, "w", None)
    np.testing.assert_array_equal(got["sum"], [4, 4])
    assert (got["list"][0], got["list"][0].dtype) == (15.0, np.float32)
    assert got["list"][1][1] is None
    assert isinstance(got["list"][1], list)
    for one, other in zip(same, VALUES, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


@RUNS
@pytest.mark.parametrize("dense_shape", [None, np.array([4, 2])])
def test_sparse_rows_become_slices_and_come_back(run, dense_shape):
    rows = SparseRows(np.ones([3, 2], np.float32), np.array([0, 3, 3]), dense_shape)

    def double(slices):
        assert isinstance(slices, tf.IndexedSlices)
        return [tf.IndexedSlices(2 * slices.values, slices.indices, slices.dense_shape)]

    (got,) = run(double, rows)
    assert isinstance(got, SparseRows)
    np.testing.assert_array_equal(got.values, 2 * rows.values)
    np.testing.assert_array_equal(got.indices, rows.indices)
    if dense_shape is None:
        assert got.dense_shape is None
    else:
        np.testing.assert_array_equal(got.to_dense(), [[2, 2], [0, 0], [0, 0], [4, 4]])


@RUNS
def test_variables_are_initialised_and_read(run):
    variable = tf.Variable(3.0)
    keras_variable = keras.Variable(4.0)

    def fn():
        if run is run_in_graph:
            made = tf.Variable(3.0), keras.Variable(4.0)
            return [*made, tf.compat.v1.get_local_variable("x", initializer=5.0)]
        return [variable, keras_variable, tf.constant(5.0)]

    assert run(fn) == [3.0, 4.0, 5.0]


def test_a_session_may_be_configured():
    assert start_logical_cpus() == CPUS
    assert len(CPUS) == NUM_CPUS == 8
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 1})

    def fn():
        with tf.device("/cpu:1"):
            return [tf.no_op(), tf.constant(1)]

    assert run_in_graph(fn) == [None, 1]
    with pytest.raises(tf.errors.InvalidArgumentError, match="CPU:1"):
        run_in_graph(fn, config=config)


@given(st.data(), st.integers(1, 5))
def test_rows_add_up_to_the_dense_array(data, size):
    count = data.draw(st.integers(0, 6))
    indices = data.draw(
        st_np.arrays(np.int64, count, elements=st.integers(0, size - 1))
    )
    values = np.arange(2.0 * count).reshape(count, 2)
    dense = SparseRows(values, indices, np.array([size, 2])).to_dense()
    want = np.zeros([size, 2])
    for index, row in zip(indices, values, strict=True):
        want[index] += row
    np.testing.assert_array_equal(dense, want)
    with pytest.raises(ValueError, match=r"to_dense: dense_shape is None; pass"):
        SparseRows(values, indices).to_dense()

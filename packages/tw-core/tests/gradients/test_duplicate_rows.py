"""Rows with the same index are added, in every mode, to the same gradient."""

import numpy as np
import pytest
import tensorflow as tf

from tw_core.gradients import sum_duplicate_rows
from tw_core.testing import SparseRows, run_eagerly, run_in_function, run_in_graph


def run_compiled(fn, *args):
    return run_in_function(tf.function(fn, jit_compile=True, autograph=False), *args)


MODES = {
    "eager": run_eagerly,
    "graph": run_in_graph,
    "function": run_in_function,
    "compiled": run_compiled,
}
INDICES = {
    "none": [],
    "one": [4],
    "distinct": [5, 0, 3, 2],
    "all the same": [3, 3, 3],
    "mixed": [4, 0, 4, 2, 0, 4, 5],
}


def rows_at(indices, dtype, index_dtype, row_shape):
    random = np.random.default_rng(len(indices))
    values = np.asarray(random.integers(-8, 9, (len(indices), *row_shape)))
    return SparseRows(
        values.astype(dtype),
        np.asarray(indices, index_dtype),
        np.asarray((6, *row_shape), index_dtype),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("row_shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize(
    ("dtype", "index_dtype"),
    [
        *[(np.float32, np.int64), (np.float16, np.int32), (np.float64, np.int32)],
        (tf.bfloat16.as_numpy_dtype, np.int64),
    ],
)
def test_each_index_occurs_once_and_the_gradient_is_the_same(
    mode, indices, row_shape, dtype, index_dtype
):
    rows = rows_at(indices, dtype, index_dtype, row_shape)
    got, unknown = MODES[mode](
        lambda *both: list(map(sum_duplicate_rows, both)),
        *(rows, rows._replace(dense_shape=None)),
    )
    assert (got.values.dtype, got.indices.dtype) == (dtype, index_dtype)
    assert unknown.dense_shape is None
    np.testing.assert_array_equal(unknown.indices, got.indices)
    np.testing.assert_array_equal(got.to_dense(), rows.to_dense())
    np.testing.assert_array_equal(got.dense_shape, rows.dense_shape)
    if mode == "compiled":
        assert len(got.indices) == len(indices)
        spare = got.values[len(set(indices)) :]
        np.testing.assert_array_equal(spare, np.zeros_like(spare))
        assert set(got.indices) == set(indices)
    else:
        assert list(got.indices) == list(dict.fromkeys(indices))


def test_the_number_of_rows_may_be_unknown_until_the_run():
    with tf.Graph().as_default():
        with tf.device("/cpu:3"):  # where they are added
            values = tf.compat.v1.placeholder(tf.float32, [None, 2])
        indices = tf.compat.v1.placeholder(tf.int64, None)
        summed = sum_duplicate_rows(tf.IndexedSlices(values, indices))
        assert summed.values.device == "/device:CPU:3"
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 8})
        with tf.compat.v1.Session(config=config) as session:
            feeds = {values: np.ones((3, 2)), indices: [7, 1, 7]}
            got = session.run(summed.values, feeds)
    np.testing.assert_array_equal(got, [[2, 2], [1, 1]])

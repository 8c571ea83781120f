"""What may be passed as a batch, and how everything else is refused.

Imports private modules: the columns that were read show nowhere else.
"""

import numpy as np
import pytest
import tensorflow as tf

from tw_rlload._loading.columns import read_columns
from tw_rlload._loading.specs import make_spec


def specs_of(**columns):
    return [
        make_spec(name, tf.TensorSpec(shape, dtype), is_state=False)
        for name, (dtype, shape) in columns.items()
    ]


SPECS = specs_of(x=(tf.float32, [None, 3]), n=(tf.int32, [None]))
X, N = np.zeros((4, 3), np.float32), np.arange(4, dtype=np.int32)


def read(given, specs=SPECS, *, check_finite=False):
    return read_columns(specs, given, check_finite=check_finite)


@pytest.mark.parametrize(
    "given",
    [
        [X, N],
        (X, N),
        {"n": N, "x": X},
        [[X[:1], X[1:1], X[1:]], (N[:3], N[3:])],
        [tf.constant(X), tf.constant(N)],
        [[tf.constant(X[:2]), X[2:]], tf.Variable(N)],
        [X.tolist(), N.tolist()],
        [X.astype(np.float64), N.astype(np.int64)],
        [np.asfortranarray(X), N[::-1][::-1]],
    ],
    ids=[
        *("list", "tuple", "dictionary", "fragments", "tensors", "mixed fragments"),
        *("nested lists", "wider dtypes", "other strides"),
    ],
)
def test_columns_are_accepted_as(given):
    x, n = read(given)
    assert (x.rows, n.rows) == (4, 4)
    assert x.row_shape == (3,)
    np.testing.assert_array_equal(np.concatenate(x.fragments), X)
    np.testing.assert_array_equal(np.concatenate(n.fragments), N)


def test_arrays_and_eager_tensors_are_not_copied():
    tensor = tf.constant(X)
    (x, _), (t, _) = read([X, N]), read([tensor, N])
    assert x.fragments[0] is X
    assert t.fragments[0].ctypes.data == np.asarray(memoryview(tensor)).ctypes.data


def test_sizes_left_open_come_from_the_data():
    (x,) = read([X], specs_of(x=(tf.float32, [None, None])))
    assert x.row_shape == (3,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([X], r"Pass 2 columns \['x', 'n'\]; got 1"),
        ({"x": X, "m": N}, r"missing: \['n'\], unknown: \['m'\]"),
        ([X[:, 0], N], r"'x' has rank 1 \(shape \[4\]\); must be \[None, 3\]"),
        ([X[:, :2], N], r"'x' has shape \[4, 2\]; must be \[None, 3\]"),
        ([[X, X[:, :2]], N], r"'x' fragment 1 has shape \[4, 2\]"),
        ([X, N.astype(object)], "'n' is an array of object; must be int32"),
        ([X, np.array(list("abcd"))], "'n' is an array of <U1; must be int32"),
        ([X[:, :2], N.astype("f")], "(?s)'x' has shape .*'n': float32 cannot"),
        ([X, N.astype(np.int64) + 2**40], "'n': int64 values .* do not fit int32"),
        ([X, [[1], [2, 3]]], "'n' is not a rectangular array"),
        ([[[1, 2, 3], [4, 5]], N], "'x' is not a rectangular array"),
    ],
)
def test_a_bad_column_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        read(given)


def test_fragments_that_differ_where_the_spec_is_open_are_refused():
    with pytest.raises(
        ValueError, match=r"fragment 1 has rows of shape \[2\], .*\[3\]"
    ):
        read([[X, X[:, :2]]], specs_of(x=(tf.float32, [None, None])))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_values_that_are_not_finite_are_refused_on_request(dtype):
    big = np.zeros((200_000, 3), dtype)  # several blocks
    n = np.zeros(200_000, np.int32)
    for bad in (np.nan, np.inf, -np.inf):
        big[[3, -1], [0, 2]] = bad
        assert read([big, n])[0].rows == 200_000
        message = "'x': 2 of 600000 values are NaN or infinite"
        with pytest.raises(ValueError, match=message):
            read([big, n], check_finite=True)

"""Which casts are refused, and what the message says.

Imports a private module: a table of dtypes needs no devices.
"""

import re

import numpy as np
import pytest
import tensorflow as tf

from tw_rlload._loading.specs import cast_fault

BFLOAT16 = tf.bfloat16.as_numpy_dtype


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (np.float32([1.5]), np.float32),
        (np.float64([0.1, np.nan, np.inf, -np.inf]), np.float32),
        (np.float64([]), np.float16),
        (np.float16([1]), BFLOAT16),
        (np.float32([3e38]), BFLOAT16),
        (np.array([1.5], BFLOAT16), np.float32),
        (np.float64([1000.0]), BFLOAT16),
        (np.int64([2**31 - 1, -(2**31)]), np.int32),
        (np.int64([]), np.int8),
        (np.uint8([255]), np.int16),
        (np.int8([127]), np.uint8),
        (np.int64([2**24, -(2**24)]), np.float32),
        (np.int32([-(2**31)]), np.float64),
        (np.int64([256]), BFLOAT16),
        (np.uint8([255]), np.float16),
        (np.array([True]), np.float32),
    ],
)
def test_a_cast_that_keeps_the_values_passes(given, wanted):
    wanted = np.dtype(wanted)
    assert cast_fault(given, wanted) is None
    if wanted.kind in "iu" or given.dtype.kind in "iu":
        np.testing.assert_array_equal(given.astype(wanted).astype(given.dtype), given)


@pytest.mark.parametrize(
    ("given", "wanted", "message"),
    [
        (np.float64([1.0]), np.int32, "float64 cannot be cast to int32 without loss"),
        (np.float32([1.0]), np.bool_, "float32 cannot be cast to bool without loss"),
        (np.int32([1]), np.bool_, "int32 cannot be cast to bool without loss"),
        (np.complex64([1]), np.float32, "complex64 cannot be cast to float32"),
        (np.int64([0, 2**31]), np.int32, "from 0 to 2147483648 do not fit int32"),
        (np.int8([-1, 3]), np.uint8, "int8 values from -1 to 3 do not fit uint8"),
        (np.int64([2**24 + 1]), np.float32, "every integer up to 16777216"),
        (np.int64([257]), BFLOAT16, "every integer up to 256"),
        (np.uint64([2**63]), np.float64, "not all exact in float64"),
        (np.float64([-1, 1e39]), np.float32, "from -1.0 to 1e.39 overflow float32"),
        (np.float64([np.inf, 1e39]), np.float32, "overflow float32"),
        (np.float32([70_000]), np.float16, "overflow float16"),
        (np.float64([1e39]), BFLOAT16, "overflow bfloat16"),
    ],
)
def test_a_cast_that_loses_is_named_with_the_values(given, wanted, message):
    assert re.search(message, cast_fault(given, np.dtype(wanted)))

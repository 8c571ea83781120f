"""Parts of ranks by groups that can only add."""

import numpy as np
import pytest
import tensorflow as tf

from tw_core.internal import all_gather, reduce_scatter


class Adding:
    """The second of three ranks, of which the others bring what they are told."""

    rank, size = 1, 3

    def __init__(self, others):
        self.others = others

    def sum(self, tensors, *, names=()):
        return [own + tf.cast(self.others, own.dtype) for own in tensors]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_sums_take_the_place_of_both_halves(dtype):
    if dtype.endswith("32") or dtype.endswith("64"):
        parts = [tf.cast(part, dtype) for part in ([1, 2], [3, 4, 5], [6])]
        got = reduce_scatter(Adding([10, 20, 30, 40, 50, 60]), parts, name="sums")
        np.testing.assert_array_equal(got, [33, 44, 55])
    own = tf.cast([3, 4, 5], dtype)
    others = Adding([1, 2, 0, 0, 0, 6])
    first, second, third = all_gather(others, own, [2, 3, 1], name="values")
    assert first.dtype == second.dtype == third.dtype == dtype
    for got, want in ((first, [1, 2]), (second, [3, 4, 5]), (third, [6])):
        np.testing.assert_array_equal(tf.cast(got, "float32"), want)

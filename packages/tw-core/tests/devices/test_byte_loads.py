"""Bytes are counted on the place where a variable ends up."""

# Private import: counting by place, which two public setters share.

from dataclasses import dataclass

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_core.devices._least_loaded import ByteLoads, bytes_of


@dataclass
class Handle:
    """A stand-in for a VarHandleOp."""

    device: str
    size: int
    name: str = "w"
    type: str = "VarHandleOp"

    def get_attr(self, name):
        return {"shape": tf.TensorShape([self.size]), "dtype": tf.int8}[name]


@given(st.lists(st.integers(0, 1000)), st.integers(1, 5))
def test_places_are_balanced_and_all_bytes_counted_once(sizes, places):
    counted = ByteLoads(places, int)
    assert counted.least() == 0
    for size in sizes:
        counted.note(Handle(str(counted.least()), size))
    assert sum(counted.bytes) == sum(sizes)
    assert max(counted.bytes) - min(counted.bytes) <= max(sizes, default=0)


@pytest.mark.parametrize(
    ("shape", "dtype", "num_bytes"),
    [
        ([], tf.float32, 4),
        ([2, 3], tf.float64, 48),
        ([0, 3], tf.float32, 0),
        ([5], tf.bfloat16, 10),
        ([5], tf.bool, 5),
    ],
)
def test_a_known_shape_counts_its_elements(shape, dtype, num_bytes, caplog):
    assert bytes_of("w", tf.TensorShape(shape), dtype) == num_bytes
    assert caplog.messages == []

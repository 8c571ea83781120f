"""Batches in parts: all rows, in order, as evenly as can be."""

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_builders._parts import cut, on_devices, plan_sizes
from tw_core import towers
from tw_keras._batches import checked_sizes, join

FOUR = towers([f"/cpu:{k}" for k in range(4)])


@given(st.integers(0, 1000), st.integers(1, 16))
def test_sizes_are_even_and_add_up(rows, parts):
    sizes = plan_sizes(rows, parts)
    assert sum(sizes) == rows
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def batch(rows):
    dense = tf.reshape(tf.range(rows * 3), [rows, 3])
    ragged = tf.RaggedTensor.from_row_lengths(
        tf.range(rows * (rows + 1) // 2), tf.range(1, rows + 1)
    )
    return {
        "x": (dense, ragged),
        "s": tf.sparse.from_dense(dense % 2),
        "none": None,
        "text": tf.strings.as_string(dense[:, 0]),
    }


def to_lists(data):
    def plain(leaf):
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.to_dense(leaf).numpy().tolist()
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.to_list()
        return None if leaf is None else leaf.numpy().tolist()

    return tf.nest.map_structure(plain, data)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("known", [True, False])
def test_parts_joined_are_the_batch(rows, known):
    data = batch(rows)

    def cut_and_join(data):
        sizes = checked_sizes(data, 4)
        assert isinstance(sizes[0], int) == known
        parts = on_devices(cut(data, sizes), FOUR)
        lengths = [tf.shape(part["x"][0])[0] for part in parts]
        return join(parts), lengths

    if known:
        joined, lengths = cut_and_join(data)
    else:
        spec = {
            "x": (
                tf.TensorSpec([None, 3], tf.int32),
                tf.RaggedTensorSpec([None, None], tf.int32, row_splits_dtype=tf.int32),
            ),
            "s": tf.SparseTensorSpec([None, 3], tf.int32),
            "text": tf.TensorSpec([None], tf.string),
        }
        del data["none"]  # which a signature cannot have
        joined, lengths = tf.function(cut_and_join, input_signature=[spec])(data)
    assert to_lists(joined) == to_lists(data)
    assert [int(n) for n in lengths] == plan_sizes(rows, 4)


def test_parts_lie_on_their_towers_devices():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [4, 2])
        devices = [part.device for part in on_devices(cut(x, [1] * 4), FOUR)]
    assert devices == [f"/device:CPU:{k}" for k in range(4)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "must hold at least one tensor"),
        ((tf.constant(1.0),), "must have rows, which are divided among towers"),
        ((tf.zeros([2]), tf.zeros([3])), r"same number of rows; got \['\(2,\)', '\(3"),
    ],
)
def test_what_has_no_rows_to_share_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        checked_sizes(data, 2)

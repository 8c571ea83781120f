"""Parts of ranks by groups that can only add."""

import numpy as np
import pytest
import tensorflow as tf

from tw_core import _rank_parts
from tw_core.internal import (
    all_gather,
    all_to_all,
    bytes_sent,
    is_gathered,
    reduce_scatter,
)
from tw_core.testing import run_in_function


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


class Alike:
    """The second of two ranks, of which the other has the same, and nothing to give."""

    rank, size = 1, 2

    def __init__(self):
        self.seen = []

    def sum(self, tensors, *, names=()):
        raise NotImplementedError

    broadcast = bounded = tell = wait_for = sum

    def reduce_scatter(self, parts, *, name):
        self.seen.append((name, [part.shape[0] for part in parts]))
        return 2 * parts[1]

    def all_gather(self, own, lengths, *, name):
        self.seen.append((name, lengths))
        return [tf.zeros(lengths[0]), own]

    def all_to_all(self, rows, *, name):
        self.seen.append((name, rows.shape.as_list()))
        return tf.stack([-rows[1], rows[1]])


@pytest.mark.parametrize("run", [lambda function: function(), run_in_function])
def test_long_parts_travel_in_pieces(monkeypatch, run):
    monkeypatch.setattr(_rank_parts, "_PIECE", 2)
    group = Alike()

    def exchange():
        parts = tf.constant([1.0]), tf.range(5.0)
        total = reduce_scatter(group, parts, name="sums")
        return total, all_gather(group, tf.range(5.0), [1, 5], name="values")

    total, (other, own) = run(exchange)
    np.testing.assert_array_equal(total, 2 * np.arange(5))
    np.testing.assert_array_equal(own, np.arange(5))
    np.testing.assert_array_equal(other, [0])
    lengths = [[1, 2], [0, 2], [0, 1]]
    assert [own for _, own in group.seen] == 2 * lengths
    assert len({name for name, _ in group.seen}) == 6


@pytest.mark.parametrize("run", [lambda function: function(), run_in_function])
def test_long_rows_travel_in_pieces(monkeypatch, run):
    monkeypatch.setattr(_rank_parts, "_PIECE", 2)
    group = Alike()

    def exchange():
        return all_to_all(group, tf.reshape(tf.range(10), [2, 5]), name="rows")

    np.testing.assert_array_equal(run(exchange), [-np.arange(5, 10), np.arange(5, 10)])
    assert [shape for _, shape in group.seen] == [[2, 2], [2, 2], [2, 1]]
    assert len({name for name, _ in group.seen}) == 3


KIB, EACH = 1 << 10, 600


@pytest.mark.parametrize(
    ("tensors", "ranks", "want"),
    [
        ([("float32", 100)], 1, 0),
        ([("float32", 4 << 20)], 2, (4 << 20) + 2 * EACH),
        ([("float32", 4 << 20)], 8, (7 << 20) + 14 * EACH),
        # A pack of 64 KiB times others is gathered; a larger one, added by a ring.
        ([("float32", 8 * KIB), ("float32", 8 * KIB)], 5, 64 * KIB + 4 * EACH),
        ([("float32", 8 * KIB), ("float32", 12 * KIB)], 5, 32 * KIB + 8 * EACH),
        ([("float32", 8 * KIB), ("float64", 12 * KIB)], 5, 80 * KIB + 8 * EACH),
        ([("float16", 10 * KIB)], 5, 16 * KIB + 8 * EACH),
        # From 2 MiB on, tensors travel alone.
        ([("float32", 2 << 20), ("int32", KIB)], 4, (3 << 20) + 3 * KIB + 9 * EACH),
    ],
)
def test_what_a_rank_sends_for_a_sum(tensors, ranks, want):
    assert bytes_sent(tensors, ranks) == want
    assert is_gathered(64 * KIB, 2)
    assert not is_gathered(64 * KIB, 3)

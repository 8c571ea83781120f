"""Sums of sparse gradients repeat a row only where an addend may."""

import numpy as np
import pytest
import tensorflow as tf

from tw_core.internal import add_rows, has_unique_rows, join_rows, split_rows
from tw_core.testing import run_eagerly, run_in_function, run_in_graph

MODES = {"graph": run_in_graph, "function": run_in_function}
IDS = np.array([4, 0, 4, 2, 0], np.int64)
SEGMENTS = np.array([0, 0, 1, 1, 1], np.int64)
each_mode = pytest.mark.parametrize("mode", MODES)


def distinct(ids):
    return tf.unique(ids)[0]


def called(fn):
    return tf.function(fn, autograph=False)


def of_table(read):
    """Returns the indices of the gradient of a table that is read."""

    def indices(ids):
        table = tf.eye(6, 2)
        return tf.gradients(read(table, ids), table)[0].indices

    return indices


def lookup(table, ids, weights=None):
    words = tf.RaggedTensor.from_value_rowids(ids, SEGMENTS)
    if weights is not None:
        weights = tf.RaggedTensor.from_value_rowids(weights, SEGMENTS)
    return tf.nn.embedding_lookup_sparse(table, words, weights, combiner="sum")


def branched(one, other):
    return lambda ids: tf.cond(ids[0] > 3, lambda: one(ids), lambda: other(ids))


def case_of(*branches):
    return lambda ids: tf.switch_case(
        tf.cast(ids[1], tf.int32), [lambda own=own: own(ids) for own in branches]
    )


def from_end(ids):
    """As Keras's ``take`` treats its indices."""
    words = distinct(ids)
    return tf.where(words < 0, words + tf.constant(6, words.dtype), words)


def past_a_function(ids):
    """Passes what one function has computed to another."""
    words = called(distinct)(ids)
    return called(lambda own: tf.reshape(own, [-1]))(words)


def in_a_function(ids):
    return called(lambda: tf.identity(called(distinct)(ids)))()


REPEATS_NONE = {
    "unique": distinct,
    "with counts": lambda ids: tf.unique_with_counts(ids).y,
    "a range": lambda ids: tf.range(tf.size(ids)),
    "reshaped": lambda ids: tf.reshape(tf.cast(distinct(ids), tf.int32), [-1]),
    "some of them": lambda ids: distinct(ids)[1:],
    "from the end": from_end,
    "a function": called(distinct),
    "a function's argument": past_a_function,
    "a function in a function": in_a_function,
    "both branches": branched(distinct, from_end),
    "every case": case_of(distinct, distinct),
    "a lookup": of_table(lookup),
    "a weighted lookup": of_table(
        lambda table, ids: lookup(table, ids, tf.ones_like(ids, tf.float32))
    ),
}
MAY_REPEAT = {
    "given": lambda ids: ids,
    "counted": lambda ids: tf.unique(ids).idx,
    "hashed": lambda ids: distinct(ids) % 2,
    "rounded": lambda ids: tf.cast(tf.cast(distinct(ids), tf.float32) / 2, tf.int64),
    "gathered": lambda ids: tf.gather(*tf.unique(ids)),
    "a function": called(tf.identity),
    "one branch": branched(distinct, tf.identity),
    "one case": case_of(distinct, tf.identity),
    "an embedding": of_table(tf.gather),
}


@pytest.mark.slow(by_day=True)
@each_mode
@pytest.mark.parametrize(
    ("repeats", "kind"),
    [*((False, kind) for kind in REPEATS_NONE), *((True, kind) for kind in MAY_REPEAT)],
)
def test_rows_are_added_where_no_addend_repeats_them_and_kept_elsewhere(
    mode, repeats, kind
):
    find = (MAY_REPEAT if repeats else REPEATS_NONE)[kind]

    def total(*towers):
        return add_rows([sparse(find(ids)) for ids in towers])

    got = MODES[mode](total, IDS, IDS + 1, IDS)
    np.testing.assert_array_equal(got.to_dense(), dense(mode, find))
    own = MODES[mode](lambda *towers: [find(ids) for ids in towers], IDS, IDS + 1, IDS)
    every = np.concatenate(own)
    if repeats:
        np.testing.assert_array_equal(got.indices, every)
    else:
        assert sorted(got.indices) == sorted(set(every))


def sparse(indices):
    """Returns a row of two numbers for each index."""
    count = tf.size(indices)
    values = tf.reshape(tf.range(2.0 * tf.cast(count, tf.float32)), [count, 2])
    return tf.IndexedSlices(values, indices, tf.constant([7, 2], indices.dtype))


def dense(mode, find):
    def of_towers(*towers):
        return [tf.convert_to_tensor(sparse(find(ids))) for ids in towers]

    return sum(MODES[mode](of_towers, IDS, IDS + 1, IDS))


@each_mode
def test_each_part_of_a_gradient_is_added_by_itself(mode):
    def tower(ids):
        table = tf.eye(6, 2)
        total = lookup(table, ids) + 2.0 * tf.gather(table, ids[:2])
        return tf.gradients(total + lookup(table, ids + 1), table)[0]

    def total(*towers):
        grads = [tower(ids) for ids in towers]
        assert not any(map(has_unique_rows, grads))
        return add_rows(grads)

    got = MODES[mode](total, IDS[:5], IDS[::-1])
    # Of two lookups three rows each, once; of an embedding two rows of each tower.
    assert len(got.indices) == 3 + 3 + 4
    assert sorted(got.indices) == sorted([0, 2, 4, 1, 3, 5, 4, 0, 0, 2])


@each_mode
def test_parts_that_are_joined_are_the_whole(mode):
    def there_and_back(ids):
        whole = sparse(tf.concat([distinct(ids), ids], 0))
        parts = split_rows(whole)
        assert list(map(has_unique_rows, parts)) == [True, False]
        return whole, join_rows(parts)

    whole, got = MODES[mode](there_and_back, IDS)
    np.testing.assert_array_equal(got.values, whole.values)
    np.testing.assert_array_equal(got.indices, whole.indices)
    np.testing.assert_array_equal(got.dense_shape, whole.dense_shape)


@each_mode
def test_nothing_else_is_split(mode):
    def parts(ids):
        whole = sparse(tf.concat([ids, ids], 0))
        assert split_rows(whole) == [whole]
        [dense] = split_rows(ids)
        assert join_rows([dense]) is ids and not has_unique_rows(ids)
        return split_rows(None)

    assert MODES[mode](parts, IDS) == [None]


def test_eagerly_nothing_is_known_and_indices_of_several_dtypes_become_int64():
    got = run_eagerly(lambda ids: add_rows([sparse(distinct(ids))] * 2), IDS)
    assert list(got.indices) == [4, 0, 2, 4, 0, 2]
    grads = [sparse(tf.range(2)), sparse(tf.range(2, dtype=tf.int64))]
    assert join_rows(grads).indices.dtype == tf.int64

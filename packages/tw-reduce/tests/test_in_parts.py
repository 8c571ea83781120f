"""Compressed parts that ranks exchange, beside models in NumPy."""

import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import tensorflow as tf

from tw_core.ranks import AllToAllGroup
from tw_reduce import ReducerState, partition
from tw_reduce.compression import (
    after,
    error_feedback,
    int8,
    power_sgd,
    sign,
    top_k,
)

F32 = np.float32
# Compressed: the first and the third, whose parts are padded; a bias, an embedding.
SHAPES = [(67, 79), (7,), (3, 3, 17, 41), (6, 2)]
BIG, SPARSE, INDICES = (0, 2), 3, [4, 0, 4]
STEPS = 8


class Rank:
    """A rank in a thread; all share the slots and the barrier."""

    bucket_bytes = None

    def __init__(self, rank, size, slots, barrier):
        self.rank, self.size = rank, size
        self._slots, self._barrier = slots, barrier
        self.exchanged = []  # kinds

    def _all(self, kind, own):
        self.exchanged.append(kind)
        self._slots[self.rank] = own
        self._barrier.wait()
        every = list(self._slots)
        self._barrier.wait()
        return every

    def sum(self, tensors, *, names=()):
        columns = zip(*self._all("sum", tensors), strict=True)
        return [_added(column) for column in columns]

    def all_to_all(self, rows, *, name):
        assert rows.shape[0] == self.size
        return tf.stack([own[self.rank] for own in self._all(name, rows)])

    def all_gather(self, own, lengths, *, name):
        every = self._all(name, own)
        assert [own.shape[0] for own in every] == lengths
        return every

    def reduce_scatter(self, parts, *, name):
        raise NotImplementedError

    broadcast = bounded = tell = wait_for = reduce_scatter


def _added(column):
    if isinstance(column[0], tf.IndexedSlices):
        values, indices = (
            [getattr(o, n) for o in column] for n in ("values", "indices")
        )
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0))
    return tf.add_n(list(column))


class Ranks:
    """Several ranks with a reducer's memory each, in threads."""

    def __init__(self, size, reducer, shapes=SHAPES, dtype=tf.float32):
        slots, barrier = [None] * size, Barrier(size, timeout=60)
        self.groups = [Rank(r, size, slots, barrier) for r in range(size)]
        self.states = [
            ReducerState(
                reducer,
                [[tf.Variable(tf.zeros(own, dtype)) for own in shapes]],
                group=group,
            )
            for group in self.groups
        ]

    def step(self, grads):
        """Takes [R][N] gradients; returns [R][N] sums."""
        with ThreadPoolExecutor(len(self.states)) as pool:
            calls = [
                pool.submit(state, [own])
                for state, own in zip(self.states, grads, strict=True)
            ]
            return [call.result()[0] for call in calls]

    def errors(self, n):
        return [state._memories[str(n)].towers[0][0].numpy() for state in self.states]


def largest(part):
    kept = np.argsort(-np.abs(part), kind="stable")[: int(np.ceil(0.02 * part.size))]
    result = np.zeros_like(part)
    result[kept] = part[kept]
    return result


def signs(part):
    return np.where(part >= 0, F32(1), F32(-1)) * np.abs(part).mean(dtype=F32)


def steps_of_127(part):
    scale = np.abs(part).max() / F32(127)
    return np.round(part / scale) * scale


COMPRESSORS = {
    "int8": (int8(), steps_of_127),
    "sign": (sign(), signs),
    "top_k": (top_k(0.02), largest),
}


class Model:
    """One compressed variable of several ranks, in NumPy, with both kinds of errors."""

    def __init__(self, approximate, size, shape):
        self.approximate, self.shape = approximate, shape
        self.count = int(np.prod(shape))
        self.length = -(-self.count // size)
        self.of_workers = np.zeros([size, size, self.length], F32)  # by rank, then part
        self.of_servers = np.zeros([size, self.length], F32)

    def step(self, grads):
        size = len(grads)
        padded = np.zeros([size, size * self.length], F32)
        padded[:, : self.count] = [own.ravel() for own in grads]
        parts = padded.reshape(size, size, self.length)
        sums = []
        for owner in range(size):
            total = parts[owner, owner] + self.of_servers[owner]
            for rank in set(range(size)) - {owner}:
                full = parts[rank, owner] + self.of_workers[rank, owner]
                sent = self.approximate(full)
                self.of_workers[rank, owner] = full - sent
                total = total + sent
            sums.append(self.approximate(total))
            self.of_servers[owner] = total - sums[-1]
        # Nothing is remembered of padding.
        for errors in (self.of_workers, self.of_servers):
            errors.reshape(-1, size * self.length)[:, self.count :] = 0
        return np.concatenate(sums)[: self.count].reshape(self.shape)

    def errors(self):
        """Each rank's: of what it sends, and of its own part the sum's."""
        both = self.of_workers.copy()
        for rank, own in enumerate(self.of_servers):
            both[rank, rank] = own
        flat = both.reshape(len(both), -1)[:, : self.count]
        return flat.reshape(-1, *self.shape)


def gradients(size, random):
    shapes = [(3, 2) if n == SPARSE else own for n, own in enumerate(SHAPES)]
    return [
        [random.standard_normal(s).astype(F32) for s in shapes] for _ in range(size)
    ]


def tensors(grads):
    return [
        [
            *map(tf.constant, own),
            tf.IndexedSlices(tf.constant(rows), tf.constant(INDICES)),
        ]
        for *own, rows in grads
    ]


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("size", [3, 4])
def test_each_step_is_that_of_a_model_with_both_errors(size, name):
    compressor, approximate = COMPRESSORS[name]
    ranks = Ranks(size, error_feedback(compressor))
    assert isinstance(ranks.groups[0], AllToAllGroup)
    random = np.random.default_rng(size)
    models = {n: Model(approximate, size, SHAPES[n]) for n in BIG}
    sums, got_sums = {n: 0.0 for n in BIG}, {n: 0.0 for n in BIG}
    for step in range(STEPS):
        grads = gradients(size, random)
        results = ranks.step(tensors(grads))
        for own in results[1:]:
            for got, first in zip(own[:SPARSE], results[0], strict=False):
                np.testing.assert_array_equal(got, first)
        [_, bias, _, sparse] = results[0]
        np.testing.assert_allclose(bias, sum(own[1] for own in grads), rtol=1e-5)
        np.testing.assert_array_equal(
            sparse.values, np.concatenate([own[SPARSE] for own in grads])
        )
        for n in BIG:
            want, got = models[n].step([own[n] for own in grads]), results[0][n].numpy()
            apart = np.abs(got - want) / np.abs(want).max()
            few = 2e-3 if name == "int8" else 0.0  # halves, rounded either way
            assert (apart > 2e-6).mean() <= few, (step, n)
            sums[n] += sum(own[n].astype(np.float64) for own in grads)
            got_sums[n] += got.astype(np.float64)
    for n in BIG:
        kept = ranks.errors(n)
        apart = np.abs(kept - models[n].errors())
        assert (apart > 2e-5).mean() <= (2e-2 if name == "int8" else 0), n
        np.testing.assert_allclose(got_sums[n] + sum(kept), sums[n], atol=1e-4)

    grads[1][1][2] = np.inf  # of a bias, and of one rank
    before = {n: ranks.errors(n) for n in BIG}
    for own in ranks.step(tensors(grads)):
        assert not all(np.isfinite(got).all() for got in own[:SPARSE])
    for n in BIG:
        np.testing.assert_array_equal(ranks.errors(n), before[n])


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float64])
def test_other_dtypes_conserve_too(dtype):
    shape, random = (70, 80), np.random.default_rng(3)
    for compressor, _ in COMPRESSORS.values():
        ranks, total, want = Ranks(3, error_feedback(compressor), [shape], dtype), 0, 0
        for _ in range(3):
            grads = [[tf.cast(random.standard_normal(shape), dtype)] for _ in range(3)]
            [[got], *_] = ranks.step(grads)
            assert got.dtype == dtype
            total += tf.cast(got, tf.float64)
            want += sum(tf.cast(own, tf.float64) for [own] in grads)
        bound = 1e-6 if dtype == tf.float64 else 0.2
        np.testing.assert_allclose(total + sum(ranks.errors(0)), want, atol=bound)


@pytest.mark.parametrize("count", [2, 3])
def test_another_number_of_ranks_sends_what_was_remembered(count):
    shape, random = (67, 79), np.random.default_rng(5)
    grads = random.standard_normal([4, *shape]).astype(F32)
    ranks, others = (Ranks(n, error_feedback(sign()), [shape]) for n in (4, count))
    [[before], *_] = ranks.step([[tf.constant(own)] for own in grads])
    saved = {"0/leaf_0": np.stack(ranks.errors(0))}
    for first, state in enumerate(others.states):
        state.load_own_variables(saved, total=count, first=first)
    [[after], *_] = others.step([[tf.zeros(shape)]] * count)
    sent = before + after + sum(others.errors(0))
    np.testing.assert_allclose(sent, grads.sum(0), atol=1e-5)
    assert np.abs(after).max() > 0


def test_memory_stays_where_the_sum_of_a_part_overflows():
    ranks = Ranks(3, error_feedback(int8()), [(64, 80)])
    ranks.step([[tf.ones([64, 80])]] * 3)
    before = ranks.errors(0)
    for [got] in ranks.step([[tf.fill([64, 80], 2e38)]] * 3):
        assert not np.isfinite(got).all()
    np.testing.assert_array_equal(ranks.errors(0), before)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_what_a_rank_sends_does_not_grow_with_their_number(size, caplog):
    caplog.set_level(logging.INFO, "tw_reduce")
    ranks = Ranks(size, error_feedback(int8()), [(67, 79), (7,)])
    grads = [[tf.ones([67, 79]), tf.ones([7])]] * size
    ranks.step(grads)
    others, each = size - 1, 600  # of a message
    length = -(-67 * 79 // size)
    words = 1 + -(-length // 4)
    plain = 4 * (7 + 1) + each  # and whether gradients are finite
    parts = 2 * (4 * words + each)
    whole = 4 * (1 + -(-67 * 79 // 4)) + 8 + 3 * each  # an index, a number of rows
    sent = others * (plain + (whole if size == 2 else parts))
    none = 4 * (67 * 79 + 7)
    if others * none <= 1 << 16:  # They are gathered.
        none = others * (none + each)
    else:
        none = 2 * others * (-(-none // size) + each)
    says = f"{sent:,} bytes to {size - 1} other ranks, where gradients take {none:,}"
    state = ranks.states[0]
    assert state.describe(ranks=size) == says
    assert says in caplog.text
    assert len(caplog.records) == size  # once each
    ranks.step(grads)
    assert len(caplog.records) == size
    exchanges = ["sum", "compressed parts 1", "sums of compressed parts 1"]
    assert ranks.groups[0].exchanged == (["sum"] if size == 2 else exchanges) * 2


def test_large_ones_are_sent_while_others_are_computed(monkeypatch):
    monkeypatch.setattr(Rank, "bucket_bytes", 6_000)
    ranks, random = Ranks(3, error_feedback(int8()), [(64, 80)] * 4), np.random
    grads = [random.default_rng(r).standard_normal([4, 64, 80]) for r in range(3)]
    results = ranks.step([list(map(tf.constant, own.astype(F32))) for own in grads])
    last = ["compressed parts 1", "sums of compressed parts 1"]
    first = ["compressed parts 2", "sums of compressed parts 2"]
    assert ranks.groups[0].exchanged == ["sum", *last, *first]
    for n, got in enumerate(results[2]):
        want = sum(own[n] for own in grads)
        np.testing.assert_allclose(got + sum(ranks.errors(n)), want, atol=1e-5)


def test_parts_of_a_choice_by_variable_are_exchanged_after_a_warm_up():
    reducer = partition(
        lambda info: "wide" if info.shape == (64, 80) else "tall",
        {
            "wide": error_feedback(int8()),
            "tall": after(1, error_feedback(int8())),
        },
    )
    ranks = Ranks(3, reducer, [(64, 80), (80, 64)])
    grads = np.random.default_rng(6).standard_normal([3, 64, 80]).astype(F32)
    rows = [[tf.constant(own), tf.transpose(own)] for own in grads]
    first, second = (ranks.step(rows) for _ in range(2))
    for [wide, tall], [again, compressed] in zip(first, second, strict=True):
        np.testing.assert_allclose(tall, grads.sum(0).T, atol=1e-5)
        sent = compressed + sum(ranks.errors(1))
        np.testing.assert_allclose(sent, grads.sum(0).T, atol=1e-5)
        sent = wide + again + sum(ranks.errors(0))
        np.testing.assert_allclose(sent, 2 * grads.sum(0), atol=1e-5)
        assert np.abs(ranks.errors(1)).max() > 0
    exchanged = ranks.groups[0].exchanged
    assert exchanged.count("compressed parts 1") == 2
    assert exchanged.count("compressed parts 2") == 1


@pytest.mark.parametrize(
    "reducer",
    [
        power_sgd(rank=2),
        error_feedback(top_k(count=9)),
        error_feedback(lambda own: ([own], lambda total: total)),
    ],
    ids=["power_sgd", "a count", "of one's own"],
)
def test_what_cannot_be_cut_is_added_or_gathered(reducer):
    ranks = Ranks(3, reducer, [(64, 80)])
    [[first], [other], _] = ranks.step([[tf.fill([64, 80], r + 1.0)] for r in range(3)])
    np.testing.assert_array_equal(first, other)
    assert set(ranks.groups[0].exchanged) == {"sum"}


def test_several_towers_of_a_rank_get_all_rows():
    slots, barrier = [None], Barrier(1)
    group = Rank(0, 1, slots, barrier)
    group.size = 3  # of which the others send nothing
    towers = [[tf.Variable(tf.zeros([64, 80]))] for _ in range(2)]
    state = ReducerState(error_feedback(int8()), towers, group=group)
    [[first], [second]] = state([[tf.fill([64, 80], 2.0)], [tf.fill([64, 80], 3.0)]])
    np.testing.assert_allclose(first, np.full([64, 80], 5.0), rtol=1e-6)
    np.testing.assert_array_equal(first, second)
    assert group.exchanged == ["sum"]
    whole = 4 * (1 + 64 * 80 // 4) + 8
    sent = 2 * (2 * whole + 3 * 600 + 4 + 600)
    assert state.describe(ranks=3).startswith(f"{sent:,} bytes to 2 other ranks")

"""The order of ranks where there are more than ten, in whatever depends on it.

TensorFlow orders the tasks of a group by their names: "task:10" before "task:2".
"""

import itertools
import signal
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from harness.ranks import Raised, Ranks

from tw_ranks._tf_compat import number_tasks

MODES = ["eager", "function", "session"]
ENGINES = ["tensorflow", *(["mpi"] if find_spec("mpi4py") else [])]


@pytest.mark.parametrize("size", [1, 9, 10, 11, 12, 99, 100, 101, 1000, 1001])
def test_tasks_ordered_by_name_are_in_the_order_of_ranks(size):
    tasks = list(number_tasks(size))
    assert len(tasks) == size
    assert sorted(tasks, key=lambda task: f"/job:worker/replica:0/task:{task}") == tasks
    assert tasks[0] == 0 or size > 10  # Few ranks have tasks of their own numbers.
    assert [int(str(task)[-len(str(size - 1)) :]) for task in tasks] == [*range(size)]


@pytest.mark.parametrize("machines", [[6, 6], [8] * 8, [12, 1], [1, 11, 3], [100, 30]])
def test_the_ring_enters_and_leaves_each_machine_once(machines):
    """Ranks of a machine are consecutive, by every launcher's default."""
    home = [n for n, count in enumerate(machines) for _ in range(count)]
    by_task = dict(zip(number_tasks(len(home)), home, strict=True))
    ring = [by_task[task] for task in sorted(by_task, key=str)]
    between = [
        pair for pair in itertools.pairwise([*ring, ring[0]]) if len({*pair}) > 1
    ]
    assert len(between) == len(machines)


@pytest.mark.slow
@pytest.mark.parametrize("size", [11, 12])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_exchange_has_the_order_of_ranks(processes, engine, size):
    """One group for all exchanges, as a dozen processes take long to start."""
    with Ranks(processes, size, engine=engine, is_quiet=True) as ranks:
        ranks.joined()
        check_parts(ranks, [5] * size)
        check_parts(ranks, [rank % 3 for rank in range(size)])
        check_means(ranks)
        check_rows(ranks)
        check_broadcasts(ranks)
        check_comparisons(ranks)
        check_refusals(ranks)
        check_a_lost_rank(ranks)


def check_parts(ranks, lengths):
    size = len(lengths)
    for in_function, dtype in itertools.product([True, False], ["float32", "float64"]):
        results = ranks.call("exchange_parts", lengths, dtype, in_function)
        sums = [
            size * (np.arange(n) + 10.0 * r) + 100.0 * sum(range(size))
            for r, n in enumerate(lengths)
        ]
        for rank, (own, every, _) in enumerate(results):
            np.testing.assert_array_equal(own, sums[rank])
            for got, of_rank in zip(every, sums, strict=True):
                narrow = "float16" if dtype == "float32" else dtype
                np.testing.assert_array_equal(got, (2 * of_rank).astype(narrow))


def check_means(ranks):
    """Sums and means by weights, as they are and narrow, of which each adds a part."""
    size = len(ranks.all)
    lengths = [3, 5_000, 70_000]
    own = [
        [np.arange(n, dtype="float32") % 7 + r for n in lengths] for r in range(size)
    ]
    weights = [float(rank % 4) for rank in range(size)]
    for mode, wire in itertools.product(MODES, [None, "bfloat16"]):
        for options in ({}, {"mean": True}):
            shares = weights if options else [1.0] * size
            calls = [
                (mode, [given], {**options, "wire_dtype": wire} | weight, 1)
                for given, weight in zip(
                    own,
                    [{"weight": w} if options else {} for w in weights],
                    strict=True,
                )
            ]
            for [got] in ranks.call_each("reduce", calls):
                for n, array in enumerate(got):
                    want = sum(s * g[n] for s, g in zip(shares, own, strict=True))
                    want = want / sum(weights) if options else want
                    np.testing.assert_allclose(
                        array, want, rtol=2**-7 if wire else 1e-6
                    )


def check_rows(ranks):
    rows = [
        (np.full([r % 3 + 1, 2], r, "float32"), np.full(r % 3 + 1, r), (20, 2))
        for r in range(len(ranks.all))
    ]
    for mode in MODES:
        calls = [(mode, [[given]], {}, 1) for given in rows]
        for [[(values, indices)]] in ranks.call_each("reduce", calls):
            np.testing.assert_array_equal(values, np.concatenate([r[0] for r in rows]))
            np.testing.assert_array_equal(indices, np.concatenate([r[1] for r in rows]))


def check_broadcasts(ranks):
    own = [
        [np.array([rank, 7.0]), np.array(rank, ml_dtypes.bfloat16)]
        for rank in range(len(ranks.all))
    ]
    for root in (0, 2, 10):
        calls = [("eager", given, root) for given in own]
        for got in ranks.call_each("exchange_variables", calls):
            for array, want in zip(got, own[root], strict=True):
                np.testing.assert_array_equal(array, want)


def check_comparisons(ranks):
    size = len(ranks.all)
    for mode, odd in itertools.product(MODES, [2, 10]):
        for rank in ranks.all:
            same, other = np.ones(3, "float32"), np.zeros(3, "float32")
            rank.say("compare_variables", mode, [other if rank.rank == odd else same])
        others = ", ".join(str(rank) for rank in range(size) if rank != odd)
        for rank in ranks.all:
            with pytest.raises(Raised, match=f": ranks {others}; rank {odd}. Look"):
                rank.hear()


def check_refusals(ranks):
    for rank in ranks.all:
        rank.say("build_unlike", [("bias", "float32", [3 if rank.rank == 10 else 4])])
    for rank in ranks.all:
        with pytest.raises(Raised, match=r"\[4\] on rank 0 and .*\[3\] on rank 10"):
            rank.hear()


def check_a_lost_rank(ranks):
    """Last: no exchange is possible without it."""
    assert ranks.call("step_until", 1) == [len(ranks.all)] * len(ranks.all)
    for rank in ranks.all:
        rank.say("step_until", None)
    ranks.all[10].send(signal.SIGKILL)
    for rank in ranks.all[:10] + ranks.all[11:]:
        with pytest.raises(Raised, match=r": rank 10 \(.*has closed") as raised:
            rank.hear()
        assert raised.value.missing == [10]

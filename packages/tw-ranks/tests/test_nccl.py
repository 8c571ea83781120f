"""NCCL between processes: its proof, its order, and what it falls back to.

There is no GPU here, where TensorFlow's ring carries what the ops leave to NCCL.
"""

import threading

import numpy as np
import pytest
from harness.ranks import Raised

from tw_ranks._uneven import _Turns

V = np.arange(1.0, 4.0)


@pytest.fixture
def make(make_ranks):
    return lambda **options: make_ranks(2, has_gpus=True, **options).joined()


def expected(steps):
    """What each step returns on both ranks."""
    total, table = 3 * V, np.zeros(5)
    table[[0, 3]] = total[:2]
    for n in range(steps):
        shift = 2.0 if n % 2 == 0 else -2.0
        yield [total, table, np.full(3, 3.0), total, total + shift, 3 * total]


def check_results(told, steps=2):
    for got, want in zip(told["results"], expected(steps), strict=True):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_every_collective_of_a_step_is_nccls_and_chained(make):
    ranks = make()
    ranks.call_each("rank_engines:use_gpu", [(b"1" * 16,), (b"2" * 16,)])
    for told in ranks.call("rank_engines:train", 2):
        check_results(told)
        assert told["engine"] == "nccl"
        assert len(told["hints"]) > 8
        assert set(told["hints"]) == {("nccl", 1)}
        assert told["unchained"] == []
        assert {scope[:7] for scope in told["scopes"]} == {"by_nccl"}


@pytest.mark.slow
def test_the_ring_takes_no_tokens_and_sends_whole_numbers_of_32_bits_as_64(make):
    ranks = make(engine="tensorflow")
    for told in ranks.call("rank_engines:train", 2):
        check_results(told)
        assert told["engine"] == "tensorflow"
        assert set(told["hints"]) == {("auto", 0)}
        assert {scope[:13] for scope in told["scopes"]} == {"by_tensorflow"}
    assert ranks.call("rank_engines:add_whole_numbers") == [([3, 3], "int32")] * 2
    assert ranks.call("rank_engines:sent", True) == [["int64"]] * 2  # to GPUs
    assert ranks.call("rank_engines:sent", False) == [["int32"]] * 2


@pytest.mark.slow
def test_wrong_sums_of_nccl_fall_back_to_the_ring(make):
    ranks = make()
    ranks.call_each("rank_engines:spoil", [(1,), (2,)])  # Rank 1's are wrong.
    for told in ranks.call("rank_engines:train", 2):
        check_results(told)
        assert told["engine"] == "tensorflow"
        assert told["reason"] == "NCCL added whole numbers wrongly on 2 of 2 ranks"


def test_wrong_sums_of_an_engine_that_was_asked_for_are_an_error(make):
    ranks = make(engine="nccl")
    ranks.call_each("rank_engines:spoil", [(1,), (2,)])
    ask = [rank.say("rank_engines:train", 1) for rank in ranks.all]
    assert len(ask) == 2
    for rank in ranks.all:
        with pytest.raises(Raised, match=r'engine="nccl" cannot be used: NCCL added'):
            rank.hear()


@pytest.mark.slow
def test_ranks_that_share_a_gpu_do_not_try_nccl(make_ranks):
    ranks = make_ranks(3, has_gpus=True).joined()
    uuids = [b"one GPU, 16 byte", b"its neighbour...", b"one GPU, 16 byte"]
    ranks.call_each("rank_engines:use_gpu", [(uuid,) for uuid in uuids])
    ranks.call_each("rank_engines:spoil", [(2,)] * 3)  # Any sum of NCCL's were wrong.
    for told in ranks.call("rank_engines:train", 1):
        assert told["engine"] == "tensorflow"
        assert told["reason"] == "ranks 0 and 2 share a GPU"
        assert set(told["hints"]) == {("auto", 0)}


@pytest.mark.parametrize(
    ("mode", "is_proven"), [("function", True), ("eager", False), ("session", False)]
)
def test_a_rank_without_any_batch_does_as_the_others_do(make, mode, is_proven):
    batches = [[([1.0, 2.0], 3), ([3.0], 3)], []]
    ranks = make(timeout_s=20.0, first_timeout_s=40.0)
    told = ranks.call_each("reduce_unevenly", [(own, mode, None) for own in batches])
    assert [(len(results), taken) for results, taken in told] == [(2, 0), (0, 2)]
    assert ranks.call("rank_engines:proven") == [is_proven] * 2
    [of_batches, of_none] = ranks.call("rank_engines:hints_of_steps")
    assert of_batches == of_none
    assert set(of_none) == {"nccl" if is_proven else "auto"}


def test_nccls_exchanges_of_a_step_take_turns():
    turns, order = _Turns(), []
    for key in (7, 3, 5):
        turns.enter(key)

    def run(key):
        for step in range(50):
            with turns.take(key):
                order.append((step, key))
        turns.leave(key)

    threads = [threading.Thread(target=run, args=(key,)) for key in (5, 7, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert order == sorted(order)
    assert len(order) == 150


def test_sessions_leave_nccl_alone(make):
    for got, is_proven in make().call("rank_engines:in_session"):
        assert got == [3.0, 3.0, 3.0]
        assert not is_proven


def test_ranks_of_other_engines_refuse_each_other(make_ranks):
    ranks = make_ranks(2, absent=[0, 1])
    ranks._options["engine"] = "tensorflow"
    ranks.come(0)
    ranks._options |= {"engine": "nccl", "has_gpus": True}
    ranks.come(1)
    with pytest.raises(Raised, match=r"has the engine tensorflow, but rank 1 .* nccl"):
        ranks.all[1].hear()  # Rank 0 goes on waiting for one that fits.

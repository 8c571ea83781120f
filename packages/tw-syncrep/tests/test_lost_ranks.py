"""Ranks that are lost: every living rank names them, in time."""

import signal
import time

import pytest
from ranks import Raised

TIMEOUT_S = 2.0


@pytest.mark.parametrize("size_and_victims", [(2, [1]), (3, [0]), (4, [1, 2])])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_missing_are_named(make_ranks, size_and_victims, number):
    size, victims = size_and_victims
    ranks = make_ranks(size, timeout_s=TIMEOUT_S, first_timeout_s=30.0).joined()
    for rank in ranks.all:
        rank.say("step_until")
    time.sleep(2)
    for victim in victims:
        ranks.all[victim].send(number)
    harmed_s = time.monotonic()
    for rank in ranks.all:
        if rank.rank not in victims:
            with pytest.raises(Raised) as raised:
                rank.hear(20)
            assert raised.value.kind == "ReplicaTimeoutError"
            # Without rank 0 nobody knows of others.
            named = [0] if 0 in victims else victims
            assert raised.value.missing == named
            assert all(f"rank {victim} (" in raised.value.text for victim in named)
    assert time.monotonic() - harmed_s < TIMEOUT_S + 5  # Not a timing: not silent.


def test_a_rank_that_does_not_come_to_the_collective_is_named(make_ranks):
    ranks = make_ranks(3, timeout_s=TIMEOUT_S, first_timeout_s=30.0).joined()
    for rank in ranks.all:
        rank.say("step_until", 3 if rank.rank == 2 else None)
    assert ranks.all[2].hear() == 9
    for rank in ranks.all[:2]:
        with pytest.raises(Raised, match=r"rank 2 \(.* has not entered collective 4"):
            rank.hear(20)


def test_a_rank_that_left_is_named_at_once(make_ranks):
    ranks = make_ranks(3, timeout_s=30.0).joined()
    assert ranks.call("step_until", 3) == [9, 9, 9]
    ranks.all[1].say("leave")
    ranks.all[1].hear()
    for rank in (ranks.all[0], ranks.all[2]):
        rank.say("step_until", 1)
    for rank in (ranks.all[0], ranks.all[2]):
        with pytest.raises(
            Raised, match=r"rank 1 \(.* has ended, and others wait for it"
        ):
            rank.hear(20)


def test_rank_0_may_leave_first(make_ranks):
    ranks = make_ranks(2, timeout_s=3.0).joined()
    assert ranks.call("step_until", 3) == [6, 6]
    ranks.all[0].say("leave")
    ranks.all[0].hear()
    ranks.all[0].end()
    time.sleep(4)  # Longer than the deadline: nobody waits for anything.
    ranks.all[1].say("place")
    assert ranks.all[1].hear()["rank"] == 1
    ranks.all[1].say("step_until", 1)
    with pytest.raises(Raised, match=r"rank 0 \(.* has ended"):
        ranks.all[1].hear(20)

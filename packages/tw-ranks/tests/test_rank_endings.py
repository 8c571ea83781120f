"""Ranks that end by themselves: they leave, fork children, and are interrupted."""

import signal
import time

import numpy as np
import pytest
from harness.ranks import Raised

LONG_S = 120.0
"""Of a deadline that no test waits for."""


@pytest.mark.slow
def test_a_forked_child_neither_leaves_for_its_rank_nor_hides_its_end(make_ranks):
    ranks = make_ranks(3, timeout_s=LONG_S).joined()
    assert ranks.call("step_until", 2) == [6, 6, 6]
    ranks.call("fork")
    assert ranks.call("step_until", 2) == [6, 6, 6]
    for rank in ranks.all:
        rank.say("step_until")
    time.sleep(1)
    ranks.all[1].send(signal.SIGKILL)
    for rank in (ranks.all[0], ranks.all[2]):
        with pytest.raises(Raised, match="has closed its connection") as raised:
            rank.hear(20)
        assert raised.value.missing == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "hit", "kind", "signal_name"),
    [
        ("function", 2, "RankTimeoutError", "SIGTERM"),
        ("eager", 0, "RankTimeoutError", "SIGINT"),
        ("session", 2, "UnknownError", "SIGINT"),
    ],
)
def test_ctrl_c_is_heard_inside_a_collective(make_ranks, mode, hit, kind, signal_name):
    ranks = make_ranks(3, timeout_s=LONG_S).joined()
    ranks.call("reduce", mode, [[np.ones(4, np.float32)]], {}, 2)
    # Rank 1 does not come, so that the others stay inside.
    waiting = [ranks.all[0], ranks.all[2]]
    for rank in waiting:
        rank.say("reduce_until_interrupted", mode)
    time.sleep(1)
    began_s = time.monotonic()
    ranks.all[hit].send(signal.Signals[signal_name])
    assert ranks.all[hit].hear(20) - began_s < 5
    waiting.remove(ranks.all[hit])
    told = rf"rank {hit} \(.*was interrupted \({signal_name}\)"
    with pytest.raises(Raised, match=told) as raised:
        waiting[0].hear(20)
    assert raised.value.kind == kind
    assert ranks.all[1].process.is_alive()


def test_neither_errors_from_outside_of_collectives_nor_a_late_leave_wait(make_ranks):
    ranks = make_ranks(2, timeout_s=LONG_S).joined()
    own = ["OutOfRangeError", "a server of the user's is away"]
    assert ranks.call("fail_outside_of_collectives") == [own, own]
    assert ranks.call("step_until", 1) == [2, 2]
    for rank in ranks.all:  # The second has no answer of rank 0.
        rank.say("leave", LONG_S)
        rank.hear(30)

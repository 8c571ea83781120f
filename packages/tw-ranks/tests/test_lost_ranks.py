"""Ranks that are lost: every living rank names them, in time.

Of the drills, as many as show each fault, victim and mode; ``nox -s faults`` runs all
of them, and again and again.
"""

import os
import re
import signal
import time

import pytest
from harness.rank_faults import is_linked, run_drill
from harness.ranks import ENGINE, Raised
from harness.task_faults import why_no_links

SLOW_S = 8.0
TIMEOUT_S = 5.0  # a busy machine silences living ranks for seconds


@pytest.mark.slow(by_day=["rank 0 killed, buckets"])
@pytest.mark.parametrize(
    "name",
    [
        "rank 0 killed, function",
        "rank 1 killed, function",
        "rank 1 killed, session",
        "machine killed, function",
        "rank 0 stopped, session",
        "machine stopped, function",
        "rank 1 cut, function",
        "machine cut, session",
        "rank 1 failed, session",
        "rank 0 stuck, session",
        "rank 0 killed, buckets",
        "rank 1 stuck, buckets",
        "rank 1 failed, buckets",
        "machine cut, buckets",
        "rank 0 interrupted, buckets",
    ],
)
def test_the_missing_are_named(processes, name):
    drill = f"processes: {name}"
    if is_linked(drill) and (reason := why_no_links(processes)):
        pytest.skip(f"links cannot be taken down here: {reason}")
    assert not run_drill(processes, drill).failure


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["session", "server", "monitored"])
def test_sessions_say_who_is_missing(make_ranks, mode):
    ranks = make_ranks(3, timeout_s=TIMEOUT_S).joined()
    assert ranks.call("step_until", 2, mode) == [6, 6, 6]
    for rank in ranks.all:
        rank.say("step_until", None, mode)
    time.sleep(1)
    ranks.all[1].send(signal.SIGKILL)
    for number in (0, 2):
        with pytest.raises(Raised) as raised:
            ranks.all[number].hear()
        assert raised.value.kind == "UnknownError"
        assert f"rank {number} of 3 cannot continue: rank 1 (" in raised.value.text
        assert "has closed its connection" in raised.value.text


@pytest.mark.skipif(os.environ.get(ENGINE) == "mpi", reason="MPI has no servers")
@pytest.mark.slow(by_day=["function"])
@pytest.mark.parametrize("mode", ["function", "session"])
def test_two_ranks_that_do_not_reach_each_other_are_named(make_ranks, mode):
    """Both reach rank 0; TensorFlow's error names an address or no rank at all."""
    ranks = make_ranks(3, timeout_s=30.0, refused={2: [1]}).joined()
    for rank in ranks.all:
        rank.say("step_until", None, mode)
    for rank in ranks.all:
        with pytest.raises(Raised) as raised:
            rank.hear()
        assert raised.value.kind == (
            "UnknownError" if mode == "session" else "RankTimeoutError"
        )
        assert re.search(
            r"cannot continue: rank 1 \(.*\) cannot be reached by rank 2: .*; "
            r"rank 2 \(.*\) waits for rank 1: \S+ does not answer \S+ "
            r"\(127\.0\.0\.1:\d+: Connection refused",
            raised.value.text,
        )
        if mode == "function":
            assert raised.value.missing == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "slow_part", [(SLOW_S, 0.0), (0.0, SLOW_S)], ids=["before", "after"]
)
def test_who_traces_for_longer_than_the_deadline_is_not_missing(make_ranks, slow_part):
    ranks = make_ranks(2, timeout_s=TIMEOUT_S).joined()
    assert ranks.call_each("trace_for", [(0.0, 0.0), slow_part]) == [2, 2]


@pytest.mark.slow
def test_who_never_comes_is_missing_after_the_first_steps_deadline(make_ranks):
    first_s = 1.5 * TIMEOUT_S
    ranks = make_ranks(2, timeout_s=TIMEOUT_S, first_timeout_s=first_s).joined()
    began_s = time.monotonic()
    ranks.all[0].say("trace_for", 0.0, 0.0)
    with pytest.raises(Raised, match=r"rank 1 \(.* has not reached 'the sum") as raised:
        ranks.all[0].hear()
    assert raised.value.missing == [1]
    assert raised.value.at_s - began_s >= first_s
    assert "waits for agreement on 'the sum" in raised.value.report
    assert "arrived   rank 0\n" in raised.value.report


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_who_is_lost_while_others_trace_is_named(make_ranks, number):
    ranks = make_ranks(3, timeout_s=TIMEOUT_S, first_timeout_s=30.0).joined()
    for rank in ranks.all[:2]:
        rank.say("step_until")
    time.sleep(1)  # They have come to agree on what they are to sum.
    ranks.all[2].send(number)
    for rank in ranks.all[:2]:
        with pytest.raises(Raised) as raised:
            rank.hear()
        assert raised.value.kind == "RankTimeoutError"
        assert raised.value.missing == [2]


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get(ENGINE) == "mpi", reason="MPI has no cluster")
def test_who_stops_when_all_have_come_is_named(make_ranks):
    ranks = make_ranks(3, timeout_s=TIMEOUT_S, stops_in_join=[1])
    living = ranks.all[0], ranks.all[2]
    for rank in living:
        rank.hear()
        rank.say("step_until")
    for rank in living:
        with pytest.raises(Raised) as raised:
            rank.hear()
        assert raised.value.missing == [1]


@pytest.mark.slow
def test_who_takes_long_to_start_its_runtime_is_not_missing(make_ranks):
    ranks = make_ranks(3, timeout_s=TIMEOUT_S, starts_in_s={0: 6.0, 2: SLOW_S}).joined()
    assert ranks.call("step_until", 2) == [6, 6, 6]


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_the_collective_is_named(make_ranks):
    options = {"timeout_s": TIMEOUT_S, "first_timeout_s": 30.0}
    ranks = make_ranks(3, stall_timeout_s=TIMEOUT_S, **options).joined()
    for rank in ranks.all:
        rank.say("step_until", 3 if rank.rank == 2 else None)
    assert ranks.all[2].hear() == 9
    for rank in ranks.all[:2]:
        with pytest.raises(
            Raised, match=r"rank 2 \(.* has not entered collective 4"
        ) as raised:
            rank.hear()
        report = raised.value.report
        assert "waits for collective 4 (traced last: 'the sum" in report
        assert "arrived   rank 0, rank 1\n" in report
        assert "missing   rank 2: has not entered collective 4 for " in report
        assert "  rank 0: is inside collective 4 " in report
        assert "  rank 2: is outside collectives, 3 completed" in report
        assert "; main thread at harness.rank_programs.run_rank:" in report
        assert "tw-ranks-member: " in report


@pytest.mark.slow
def test_a_rank_that_is_busy_and_answers_is_waited_for_with_a_warning(make_ranks):
    """Rank 1 has finished; then rank 0 is busy again, and does not answer."""
    ranks = make_ranks(2, timeout_s=TIMEOUT_S).joined()
    calls = [(3, "beside others", 60.0), (2, "beside others", 0.0)]
    for told in ranks.call_each("finish_beside_busy", calls):
        # Where the machine is busy too, other stalls come before this one.
        warnings = [warning for warning in told if "be_busy" in warning]
        assert warnings
        for warning in warnings:
            assert re.search(
                r"rank 0 \(.*\) has not entered collective \d+ for .* s, but others "
                r"have; it is outside collectives, .*; main thread at "
                r"harness.rank_programs.be_busy:\d+\. "
                r"Ranks wait up to 600 s for a rank that answers\.$",
                warning,
            )
    ranks.all[0].say("finish_beside_busy", 2, "held", 60.0)
    ranks.all[1].say("finish_beside_busy", 2, "beside others", 0.0)
    with pytest.raises(Raised, match=r"rank 0 \(.* has been silent for") as raised:
        ranks.all[1].hear()
    assert raised.value.missing == [0]


@pytest.mark.slow(by_day=["1-raise SystemExit(3)-"])
@pytest.mark.parametrize(
    ("victim", "source", "fault"),
    [
        (0, "raise ValueError('mine')", r"with an exception \(ValueError\)"),
        (1, "import sys; sys.exit('mine')", r"with an error status \(sys.exit\)"),
        (1, "raise SystemExit(3)", ""),
    ],
)
def test_a_program_that_ends_before_the_first_collective_is_named_at_once(
    make_ranks, victim, source, fault
):
    ranks = make_ranks(3, timeout_s=60.0).joined()
    living = [rank for rank in ranks.all if rank.rank != victim]
    living[0].say("step_until", 1)  # Waits to agree, the other comes to it later.
    ranks.all[victim].say("end_program", source)
    ranks.all[victim].process.join(60)
    living[1].say("step_until", 1)
    told = f"has ended {fault}" if fault else "has ended, but others wait for it"
    for rank in living:
        with pytest.raises(Raised, match=rf"rank {victim} \(.*\) {told}") as raised:
            rank.hear()
        assert raised.value.missing == [victim]


@pytest.mark.slow
def test_rank_0_may_leave_first(make_ranks):
    ranks = make_ranks(2, timeout_s=TIMEOUT_S).joined()
    assert ranks.call("step_until", 3) == [6, 6]
    ranks.all[0].say("leave")
    ranks.all[0].hear()
    ranks.all[0].kill()
    time.sleep(TIMEOUT_S + 0.5)  # Longer than the deadline: nobody waits for anything.
    ranks.all[1].say("place")
    assert ranks.all[1].hear()["rank"] == 1
    ranks.all[1].say("step_until", 1)
    with pytest.raises(Raised, match=r"rank 0 \(.* has ended"):
        ranks.all[1].hear()

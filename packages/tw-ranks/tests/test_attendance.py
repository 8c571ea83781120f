"""Who is missing: the rules, from what ranks say of themselves, without processes."""

import sys

import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from tw_ranks._agreement import Exchange
from tw_ranks._endpoint.progress import Progress
from tw_ranks._side_channel._attendance import (
    Attendance,
    Deadlines,
    Report,
    describe_missing,
    describe_slow,
)
from tw_ranks._side_channel._connections import Link
from tw_ranks._side_channel._introduction import find_interval_s

LIMITS = Deadlines(10.0, 100.0, stall_timeout_s=40.0, warning_s=5.0)


def attendance(size=3):
    return Attendance(size, LIMITS, now_s=0.0)


def all_say(found, now_s, *entered, completed=None):
    for rank, count in enumerate(entered):
        done = count if completed is None else completed[rank]
        found.hear(rank, Report(entered=count, completed=done), now_s)


def test_silent_ranks_are_missing_from_the_deadline_on_and_closed_ones_at_once():
    found = attendance()
    found.hear(1, Report(), 5.0)
    assert found.find_missing(9.9) == {}
    assert sorted(found.find_missing(10.0)) == [0, 2]
    assert "silent for 10.0 s" in found.find_missing(10.0)[0]
    found.close(2)
    assert list(found.find_missing(0.0)) == [2]


@pytest.mark.parametrize(("silent_s", "is_said"), [(None, True), (2.0, False)])
def test_a_silence_before_a_loss_is_said_unless_rank_0_read_late(silent_s, is_said):
    found = attendance()
    found.hear(1, Report(), 1.5)
    found.hear(1, Report(), 6.0, silent_s)
    found.close(1)
    assert ("silent for 4.5 s" in found.find_missing(6.0)[1]) == is_said


@pytest.mark.parametrize(
    ("timeout_s", "size", "interval_s", "silence_s"),
    [(60.0, 8, 0.25, 1.0), (60.0, 1000, 2.0, 8.0), (2.0, 1000, 0.25, 1.0)],
)
def test_many_ranks_report_less_often_and_none_is_called_silent_between(
    timeout_s, size, interval_s, silence_s
):
    assert find_interval_s(timeout_s, size) == interval_s
    for silent_s in (silence_s - 0.1, silence_s):
        found = Attendance(size, Deadlines(timeout_s, 100.0), now_s=0.0)
        found.hear(1, Report(), silent_s)
        found.close(1)
        said = found.find_missing(silent_s + 0.1)[1]
        assert ("silent for" in said) == (silent_s == silence_s)


def test_who_answers_and_stays_behind_is_warned_of_and_has_the_longer_deadline():
    found = attendance()
    all_say(found, 1.0, 5, 5, 5)
    all_say(found, 2.0, 6, 5, 6)
    for now_s in (6.9, 7.0, 16.0, 25.0, 34.0, 41.9):
        all_say(found, now_s, 6, 5, 6)
        assert found.find_missing(now_s) == {}
        assert list(found.find_slow(now_s)) == ([1] if now_s >= 7.0 else [])
    all_say(found, 42.0, 6, 5, 6)
    assert found.find_missing(42.0) == {
        1: "has not entered collective 6 for 40.0 s, but others have"
    }


def test_who_stays_behind_and_falls_silent_has_the_short_deadline():
    found = attendance()
    all_say(found, 1.0, 6, 5, 6)
    for rank in (0, 2):
        found.hear(rank, Report(6, 5), 11.0)
    assert found.find_missing(11.0) == {1: "has been silent for 10.0 s"}


def test_the_first_collective_has_a_deadline_of_its_own():
    found = attendance()
    for now_s in (1.0, 50.0, 99.0, 100.9):
        all_say(found, now_s, 1, 0, 1, completed=[0, 0, 0])
        assert found.find_missing(now_s) == {}
    all_say(found, 101.0, 1, 0, 1, completed=[0, 0, 0])
    assert list(found.find_missing(101.0)) == [1]


def test_who_has_just_traced_has_the_longer_deadline():
    found = attendance(2)
    found.hear(0, Report(entered=5, completed=4), 0.0)
    for now_s in (0.0, 40.0, 99.0):
        found.hear(1, Report(entered=4, completed=4, traced=4), now_s)
        found.hear(0, Report(entered=5, completed=4), now_s)
        assert found.find_missing(now_s) == {}


def test_who_catches_up_starts_anew():
    found = attendance(2)
    all_say(found, 0.0, 3, 1)
    assert list(found.find_slow(8.9)) == [1]
    all_say(found, 9.0, 3, 2)  # Still behind, but it moves.
    assert found.find_slow(9.0) == {}
    all_say(found, 48.0, 3, 2)
    assert found.find_missing(48.0) == {}
    all_say(found, 49.0, 3, 2)
    assert list(found.find_missing(49.0)) == [1]


def test_a_rank_that_left_is_missing_when_others_wait_for_it_or_to_agree_with_it():
    found = attendance(2)
    found.leave(1)
    found.close(1)
    assert found.find_missing(0.0) == {}
    # Before the first collective none is behind.
    assert found.find_missing(0.0, awaited={1}) == {
        1: "has ended, but others wait for it"
    }
    assert found.find_missing(0.0, awaited={0}) == {}
    found = attendance(2)
    all_say(found, 0.0, 4, 4)
    found.leave(1)
    found.close(1)
    assert found.find_missing(1_000.0).get(1) is None
    found.hear(0, Report(entered=5, completed=4), 1_000.0)
    assert "has ended" in found.find_missing(1_000.0)[1]


@pytest.mark.parametrize("then", [Attendance.close, Attendance.leave])
def test_who_says_that_it_fails_is_missing_at_once_and_stays_so(then):
    found = attendance()
    found.fail(2, "has ended by an error")
    then(found, 2)
    assert found.find_missing(0.0) == {2: "has ended by an error"}


def test_all_inside_and_none_gets_out():
    found = attendance(2)
    all_say(found, 0.0, 7, 7, completed=[6, 7])
    for now_s in (4.9, 5.0, 14.0, 23.0, 32.0, 39.9):
        all_say(found, now_s, 7, 7, completed=[6, 7])
        assert found.find_missing(now_s) == {}
        assert list(found.find_slow(now_s)) == ([0] if now_s >= 5.0 else [])
    all_say(found, 40.0, 7, 7, completed=[6, 7])
    assert list(found.find_missing(40.0)) == [0]
    assert found.find_missing(40.0)[0] == (
        "has been inside collective 7 for 40.0 s (all have entered it): a connection "
        "between ranks is lost or slow"
    )


def test_ranks_inside_of_different_collectives_are_told_apart():
    found = attendance(3)
    for rank, inside in enumerate(["a sum", "a sum", "a broadcast"]):
        found.hear(rank, Report(7, 6, inside=inside), 0.0)
    says = (
        "has been inside {!r}, its collective 7, for 5.0 s, while others are inside "
        "another one: the ranks' programs differ"
    )
    assert found.find_slow(5.0) == {
        0: says.format("a sum"),
        1: says.format("a sum"),
        2: says.format("a broadcast"),
    }


def test_what_ranks_are_inside_of_counts_more_than_what_they_traced_last():
    found = attendance(2)
    for rank, what in enumerate(["a sum of w", "a sum of v"]):
        found.hear(rank, Report(7, 6, inside="a sum", what=what), 0.0)
    assert "inside a sum of w, its collective 7" in found.find_slow(5.0)[0]
    found = attendance(2)
    for rank, inside in enumerate(["a sum", "a broadcast"]):
        found.hear(rank, Report(7, 6, inside=inside, what="a sum of w"), 0.0)
    assert "a connection between ranks is lost or slow" in found.find_slow(5.0)[0]


def test_the_last_exchange_is_over_when_all_who_are_left_have_completed_it():
    found = attendance(5)
    all_say(found, 0.0, 3, 3, 3, 2, 3, completed=[3, 2, 2, 2, 2])
    assert found.find_slowest() == 2
    found.leave(2)
    found.close(3)
    found.fail(4, "has ended by an error")
    assert found.find_slowest() == 2
    found.hear(1, Report(3, 3), 1.0)
    assert found.find_slowest() == 3


@pytest.mark.parametrize("is_silent", [True, False])
def test_who_is_held_up_inside_a_collective_does_not_stay_behind(is_silent):
    """Rank 2 is lost in collective 5, of which ranks 0 and 3 have their results."""
    found = attendance(4)
    all_say(found, 0.9, 5, 5, 5, 5, completed=[4, 4, 4, 4])
    for now_s in (1.0, 5.0, 14.0, 23.0, 32.0, 41.0):
        for rank, (entered, completed) in {0: (6, 5), 1: (5, 4), 3: (6, 5)}.items():
            found.hear(rank, Report(entered, completed), now_s)
        if not is_silent:
            found.hear(2, Report(6, 5), now_s)
    missing = found.find_missing(41.0)
    if is_silent:
        assert list(missing) == [2]
        assert "silent" in missing[2]
    else:  # Nobody is silent: something between ranks is lost.
        assert list(missing) == [1]
        assert "has been inside collective 5" in missing[1]


def test_who_waits_for_one_that_is_gone_does_not_stay_behind():
    """Rank 1 waits, outside, for what it and rank 2 are to agree on."""
    found = attendance()
    all_say(found, 0.0, 3, 3, 3)
    for now_s in (0.0, 8.0, 200.0):
        found.hear(0, Report(entered=4, completed=3), now_s)
        found.hear(1, Report(entered=3, completed=3), now_s)
    assert list(found.find_missing(200.0)) == [2]


def test_the_unheard_are_those_that_said_nothing_since():
    found = attendance(4)
    all_say(found, 3.0, 1, 1, 1, 1)
    found.hear(1, Report(), 5.0)
    found.leave(3)
    assert found.find_unheard(3.0, 5.0) == []
    assert found.find_unheard(4.0, 5.0) == [0, 2]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0.01, 2.0), st.booleans()), max_size=80
    )
)
def test_ranks_that_speak_and_move_are_never_missing(moves):
    """Whoever speaks within the deadline, and follows the others in time, is there."""
    found, counts, now_s = attendance(), [0, 0, 0], 0.0
    behind_s = [0.0, 0.0, 0.0]  # For how long others have been ahead.
    for mover, later_s, moves_on in moves:
        now_s += later_s
        for rank in range(3):
            is_behind = counts[rank] < max(counts)
            behind_s[rank] = behind_s[rank] + later_s if is_behind else 0.0
            # A collective ends when all have entered it; none may wait for too long.
            may_move = counts[rank] == min(counts)
            if (rank == mover and moves_on and may_move) or behind_s[rank] > 5.0:
                counts[rank] += 1
                behind_s[rank] = 0.0
        for rank in range(3):
            found.hear(rank, Report(counts[rank], min(counts)), now_s)
        if min(counts):  # Before the first, nobody moves for longer than the deadline.
            stuck = len(set(counts)) == 1
            assert stuck or found.find_missing(now_s) == {}


def test_sentences_name_all_and_a_warning_says_how_long_they_are_waited_for():
    text = describe_missing({2: "is gone", 0: "is silent"}, ["a", "b", "c"], own=1)
    assert text == (
        "rank 1 of 3 cannot continue: rank 0 (a) is silent; rank 2 (c) is gone"
    )
    text = describe_slow({1: "is late"}, ["a", "b"], own=0, limit_s=600.0)
    assert text == (
        "rank 0 of 2 reports a stall: rank 1 (b) is late. Ranks wait up to 600 s "
        "for a rank that answers."
    )


def test_what_every_rank_is_inside_of_is_told_with_when_it_last_moved():
    found = attendance(4)
    all_say(found, 1.0, 5, 5, 5, 5)
    found.hear(0, Report(entered=6, completed=5, inside="the sum"), 2.0)
    found.hear(2, Report(entered=6, completed=5, at="train.evaluate:47"), 3.0)
    found.hear(3, Report(entered=5, completed=5), 4.0)
    found.leave(3)
    found.close(1)
    assert found.find_arrived() == [0, 2]
    assert found.describe(5.0) == {
        0: "is inside collective 6 (traced last: 'the sum') for 3.0 s; heard 3.0 s ago",
        1: "is outside collectives, 5 completed, for 4.0 s; heard 4.0 s ago; its "
        "connection has closed",
        2: "is inside collective 6 for 2.0 s; heard 2.0 s ago; main thread at "
        "train.evaluate:47",
        3: "has left after 5 collectives",
    }


SUM, LOSS = ("'an allreduce' of sum", "'an allreduce' of loss")


def in_collective(found, rank, now_s, number, what, order="", among=0):
    inside = Report(4, 3, number=number, among=among, what=what, order=order)
    found.hear(rank, inside, now_s)


def test_ranks_in_different_collectives_are_named_with_both():
    found = attendance()
    for tenth in range(20):
        in_collective(found, 0, tenth / 2, 7, SUM)
        in_collective(found, 1, tenth / 2, 9, LOSS)
        in_collective(found, 2, tenth / 2, 7, SUM)
        missing = found.find_missing(tenth / 2)
        assert bool(missing) == (tenth >= 2)
    assert list(missing) == [1]
    assert f"is in {LOSS}, rank 0 in {SUM}" in missing[1]


def test_a_rank_in_what_others_have_completed_is_in_no_other_collective():
    """The root of a broadcast goes on while a slow link carries what it has sent."""
    found = attendance(2)
    for now_s in range(9):
        found.hear(0, Report(5, 4, number=9, what=LOSS), float(now_s))
        in_collective(found, 1, now_s, 7, SUM)
        assert found.find_missing(now_s) == {}


@pytest.mark.parametrize(
    "second", [(7, ""), (0, ""), (9, "loss"), (9, "", 4), (7, "", 9)]
)
def test_ranks_that_can_still_meet_are_not_named(second):
    found = attendance(2)
    for now_s in range(9):
        in_collective(found, 0, now_s, 7, SUM, among=4)
        in_collective(found, 1, now_s, second[0], LOSS, *second[1:])
        assert found.find_missing(now_s) == {}


def test_ranks_in_collectives_of_different_functions_are_named():
    found = attendance(2)
    for now_s in range(9):
        in_collective(found, 0, now_s, 7, SUM, among=4)
        in_collective(found, 1, now_s, 9, LOSS, among=9)
    assert list(found.find_missing(8)) == [1]


def progress_inside(built, *inside):
    """Builds exchanges, pairs of keys and graphs; begins those of the keys inside."""
    progress = Progress()
    progress.note_thread()
    for key, graph in built:
        progress.note_agreed(key, Exchange("a sum", ()))
        progress.note_independent(key, graph)
    for key in inside:
        progress.variable.assign_add(progress.marks(key, begins=True, needs_all=False))
    return progress


def test_exchanges_of_one_function_have_a_number_in_common():
    step, test, other = tf.Graph(), tf.Graph(), tf.Graph()
    built = [(0, step), (2, step), (4, test), (0, test), (6, other)]
    reports = {
        inside: progress_inside(built, *inside).report(None)
        for inside in [(0,), (2,), (4,), (6,), (2, 4), (4, 6)]
    }
    among = {inside: own.among for inside, own in reports.items()}
    assert among[0,] == among[2,] == among[4,] == among[2, 4] != among[6,]
    numbers = [own.number for own in reports.values()]
    assert numbers == [0, 2, 4, 6, 2, 0]
    assert all(own.what == "'a sum'" for own in reports.values())


def test_exchanges_of_one_owner_have_a_number_in_common():
    owner, progress = tf.Graph(), Progress()
    with progress.in_any_order(owner):
        progress.note_independent(0, tf.Graph())
        progress.note_independent(2, tf.Graph())
    progress.note_independent(4, tf.Graph())
    for key in (0, 2, 4):
        progress.note_agreed(key, Exchange("a sum", ()))
    among = []
    for key in (0, 2, 4):
        progress.variable.assign_add(progress.marks(key, begins=True, needs_all=False))
        among.append(progress.report(None).among)
        progress.variable.assign_add(progress.marks(key, begins=False, needs_all=False))
    assert among[0] == among[1] != among[2]
    assert progress.read() == (3, 3, 0)


def test_an_old_report_is_compared_with_none():
    """A rank that is not heard for a while may have gone on with the others."""
    found = attendance(2)
    for now_s in range(3):
        in_collective(found, 0, now_s, 7, SUM)
    for now_s in range(3, 9):
        in_collective(found, 1, now_s, 9, LOSS)
        assert found.find_missing(now_s) == {}


def test_one_name_is_described_alike():
    found = attendance(2)
    for now_s in range(3):
        in_collective(found, 0, now_s, 7, SUM, "loss")
        in_collective(found, 1, now_s, 9, LOSS, "loss")
    assert sorted(found.find_missing(2)) == [1]


def test_a_finished_rank_is_missing_where_all_are_needed():
    found = attendance(2)
    found.ranks[1].finished = True
    found.hear(0, Report(entered=1), 1.0)
    assert found.find_missing(1.0) == {}
    found.hear(0, Report(entered=2, needing_all=1), 1.0)
    [(missing, why)] = found.find_missing(1.0).items()
    assert missing == 1
    assert "rank 0 has reached a collective, which needs all ranks" in why


@example([(n % 4, 1 + n % 3) for n in range(500)])  # Of which it forgets.
@example([(n % 3, 1) for n in range(500)])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 3)), max_size=300))
def test_a_rank_is_behind_from_the_first_report_of_one_that_is_ahead(moves):
    """As by comparing all ranks with the front at each report."""
    found, behind_s = attendance(4), [None] * 4
    for now_s, (rank, more) in enumerate(moves, start=1):
        before = [other.report.entered for other in found.ranks]
        found.hear(rank, Report(max(0, before[rank] + more)), now_s)
        entered = [other.report.entered for other in found.ranks]
        for other in range(4):
            if entered[other] == max(entered):
                behind_s[other] = None
            elif behind_s[other] is None or entered[other] != before[other]:
                behind_s[other] = now_s
        assert [found._find_behind_s(other) for other in found.ranks] == behind_s


def count_lines(size):
    """Counts the lines that run for the beats and looks of a quarter of a second."""
    found, lines = attendance(size), 0

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for look in range(5):
            for rank in range(look, size, 5):
                found.hear(rank, Report(look * size + rank + 1, 0), look / 20)
            found.find_missing(look / 20)
            found.find_slow(look / 20)
    finally:
        sys.settrace(before)
    return lines


def test_the_work_grows_with_the_ranks_and_not_with_their_square():
    assert count_lines(400) < 5 * count_lines(100)


def stuck(links, size=4, **completed):
    """Ranks inside of collective 5, that have looked at their connections."""
    found = attendance(size)
    for rank in range(size):
        done = completed.get(f"rank_{rank}", 4)
        found.hear(rank, Report(entered=5, completed=done), 1.0)
        found.hear(rank, Report(entered=5, completed=done), 40.0)
        found.ranks[rank].links = links.get(rank, {})
    return found


SILENT = Link("a does not answer b (a:1: timed out)")


def test_of_two_ranks_that_do_not_reach_each_other_both_are_named_and_no_others():
    found = stuck({1: {0: Link(), 2: SILENT, 3: Link()}, 2: {1: SILENT, 0: Link()}})
    assert found.doubts_links(41.0, 40.0)
    assert found.has_links
    assert found.find_missing(41.0) == {
        1: "has been inside collective 5 for 40.0 s and cannot reach rank 2: "
        f"{SILENT.fault}",
        2: "has been inside collective 5 for 40.0 s and waits for rank 1: "
        f"{SILENT.fault}",
    }
    assert list(found.find_slow(6.0)) == [1, 2]
    found.forget_links()
    assert not found.has_links
    assert list(found.find_missing(41.0)) == [0, 1, 2, 3]


def test_who_is_reached_in_one_direction_alone_is_named_too():
    found = stuck({2: {1: SILENT}})
    missing = found.find_missing(41.0)
    assert list(missing) == [1, 2]
    assert missing[1] == f"cannot be reached by rank 2: {SILENT.fault}"


def test_of_several_connections_those_that_the_ring_needs_are_blamed():
    found = stuck({0: {3: SILENT}, 2: {3: SILENT}})
    assert found.find_missing(41.0) == {
        3: f"cannot be reached by rank 0: {SILENT.fault}, and cannot be reached by "
        f"rank 2: {SILENT.fault}"
    }
    parted = {0: {2: SILENT}, 2: {0: SILENT}}
    assert list(stuck(parted).find_missing(41.0)) == [0, 2]  # For want of a better.
    assert list(stuck({**parted, 1: {2: SILENT}}).find_missing(41.0)) == [1, 2]
    # The last rank is before the first, and 9 before 10.
    found = stuck({0: {11: SILENT}, 1: {10: SILENT}}, size=12)
    assert list(found.find_missing(41.0)) == [0, 11]
    found = stuck({10: {2: SILENT, 11: SILENT, 9: SILENT}}, size=12)
    [(rank, why)] = found.find_missing(41.0).items()
    assert rank == 10
    assert "waits for rank 9" in why and "cannot reach rank 11" in why
    assert "rank 2:" not in why


def test_the_ends_of_slow_connections_are_named():
    slow, idle, busy = Link("", 9_800.0), Link("", 12.0), Link("", 1e8)
    # Though one of them is through.
    found = stuck({0: {1: idle, 2: slow}, 1: {0: idle}}, size=3, rank_2=5)
    assert found.find_slow(6.0) == {
        0: "is at an end of the connection that collective 5 waits for: it receives "
        "9.8 kB/s from rank 2",
        2: "is at an end of the connection that collective 5 waits for: rank 0 "
        "receives 9.8 kB/s from it",
    }
    # Who is at all of them is named alone.
    assert list(stuck({0: {3: slow}, 3: {2: slow}}).find_slow(6.0)) == [3]
    # Where all connections are in use, none is slow.
    found = stuck({0: {2: busy}, 1: {0: busy}, 2: {1: busy}}, size=3)
    assert all("all have entered it" in why for why in found.find_slow(6.0).values())
    assert list(found.find_slow(6.0)) == [0, 1, 2]


def test_a_failed_collective_names_the_pair_at_once_and_not_once_it_goes_on():
    found = stuck({2: {1: SILENT}, 1: {2: SILENT}})
    found.hear(3, Report(entered=6, completed=5), 40.0)
    assert found.find_missing(40.5) == {}
    found.ranks[2].failed = True
    assert found.has_failed
    assert found.find_missing(40.5) == {
        1: f"cannot reach rank 2: {SILENT.fault}",
        2: f"waits for rank 1: {SILENT.fault}",
    }
    found.close(0)  # Whose connections nobody needs to look at.
    assert list(found.find_missing(40.5)) == [0]
    assert not found.doubts_links(40.5, 40.0)
    found.hear(2, Report(entered=6, completed=5), 41.0)
    assert not found.has_failed


def test_an_older_report_over_another_connection_is_ignored():
    found = attendance()
    found.hear(1, Report(entered=3, completed=3, made=9), 2.0)
    found.hear(1, Report(entered=1, completed=1, made=4), 3.0)
    assert found.ranks[1].report.entered == 3
    assert found.ranks[1].heard_s == 2.0


@pytest.mark.parametrize("ends_by", ["closing", "failing"])
def test_of_a_rank_that_is_lost_after_an_outage_this_is_told(ends_by):
    found = attendance()
    found.hear(1, Report(), 1.0)
    found.hear(1, Report(), 5.5)
    if ends_by == "closing":
        found.close(1)
    else:
        found.fail(1, "has ended by an error")
    told = "; before that it was silent for 4.5 s: its process was stopped, or its "
    assert told in found.find_missing(5.9)[1]
    found.hear(0, Report(), 20.0)
    found.hear(2, Report(), 20.0)
    found.ranks[1].heard_s = 20.0
    assert "silent" not in found.find_missing(20.0)[1]


def test_rank_0_without_any_other_rank_says_that_it_may_be_cut_off():
    found, itself = attendance(), "so rank 0 itself may be cut off"
    found.hear(0, Report(), 10.0)
    assert all(itself in why for why in found.find_missing(10.0).values())
    assert list(found.find_missing(10.0)) == [1, 2]
    found.close(2)
    assert all(itself not in why for why in found.find_missing(10.0).values())
    found = attendance()
    found.hear(0, Report(), 10.0)
    found.hear(2, Report(), 10.0)
    assert found.find_missing(10.0) == {1: "has been silent for 10.0 s"}

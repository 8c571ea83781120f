"""The rules of a timeline: names, spans, clocks, the choice of steps and waits."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_doctor import Arrival, Call, Interval, RecordedStep, explained, waits
from tw_doctor._timeline.clocks import Before, align_clocks
from tw_doctor._timeline.intervals import gaps, length, union
from tw_doctor._timeline.pace import LONG_MS, PLAIN, SHARE, WINDOW, Pace
from tw_doctor._timeline.parts import cargo_of, part_of, producer_of, tower_of
from tw_doctor._timeline.summary import summarize
from tw_doctor._timeline.trace import lanes, trace_of
from tw_doctor._timeline.waits import CORES

OPS = {
    ("tower1/matmul_3", "_MklMatMul"): ("forward", 1),
    ("tower0/gradients/tower0/matmul_2_grad/MatMul_1", "MatMul"): ("backward", 0),
    ("gradient_tape/tower1/sequential_1/dense_1/MatMul/MatMul", "MatMul"): (
        "backward",
        1,
    ),
    ("all_reduce/sum_on_device/sum_on_device/AddN_1", "AddN"): ("reduce", None),
    ("StatefulPartitionedCall/mean/mul_4", "Mul"): ("reduce", None),
    ("tower1/CollectiveReduceV2", "CollectiveReduceV2"): ("reduce", 1),
    ("apply_grad/update_w0/ResourceApplyAdam", "ResourceApplyAdam"): ("apply", None),
    ("tower1/sgd_1/AssignSubVariableOp_3", "AssignSubVariableOp"): ("apply", 1),
    ("train/update_w/Sub", "Sub"): ("apply", None),
    ("AssignAddVariableOp", "AssignAddVariableOp"): ("apply", None),
    ("apply_gradients/tower0_4/StatefulPartitionedCall", "StatefulPartitionedCall"): (
        "apply",
        0,
    ),
    ("tower0/adam_w_3/Square_2", "Square"): ("apply", 0),
    ("accumulate/cond/all_reduce/mean/mul", "Mul"): ("reduce", None),
    ("tower1/bn/AssignVariableOp", "AssignVariableOp"): ("forward", 1),
    ("x/_1", "_Send"): ("move", None),
    ("tower1/Relu/_31", "_Recv"): ("move", 1),
    ("IteratorGetNext", "IteratorGetNext"): ("input", None),
    ("staging_input/Unstage", "Unstage"): ("input", None),
    ("load/Cast", "Cast"): ("input", None),
    ("split", "Split"): ("other", None),
    # Words of a reducer count as scopes only: a layer's op may be called so.
    ("tower0/moments/mean", "Mean"): ("forward", 0),
}


@pytest.mark.parametrize(("op", "expected"), OPS.items())
def test_names_tell_part_and_tower(op, expected):
    assert (part_of(*op), tower_of(op[0])) == expected


def test_what_was_read_of_a_variable_travels_as_variables():
    assert cargo_of("tower1/matmul/ReadVariableOp_2") == "variables"
    assert cargo_of("tower1/gradients/x_grad/MatMul_1") == "backward"
    # An update's own reads, as of a learning rate, are part of it.
    assert cargo_of("apply_gradients/ReadVariableOp_1") == "apply"
    assert cargo_of("copy_from_owners/Read_2/ReadVariableOp") == "apply"


@pytest.mark.parametrize(
    ("name", "producer"),
    [
        ("tower1/MatMul_1/_31", "tower1/MatMul_1"),
        ("tower1/MatMul_1_S5", "tower1/MatMul_1"),
        ("^tower1/MatMul_1", "tower1/MatMul_1"),
        ("tower1/split:2", "tower1/split"),
    ],
)
def test_the_maker_of_a_tensor_is_found_by_what_names_the_tensor(name, producer):
    assert producer_of(name) == producer


whole = st.integers(0, 40)
spans = st.lists(st.tuples(whole, whole).map(lambda s: tuple(sorted(s))), max_size=8)


@given(spans, st.tuples(whole, whole).map(lambda s: tuple(sorted(s))))
def test_spans_and_gaps_cover_each_moment_once(own, within):
    seconds = {n for a, b in own for n in range(a, b)}
    assert length(own) == len(seconds)
    assert {n for a, b in union(own) for n in range(a, b)} == seconds
    free = gaps(own, within)
    assert all(a < b for a, b in free)
    inside = set(range(*within))
    assert {n for a, b in free for n in range(a, b)} == inside - seconds
    assert sum(b - a for a, b in free) == len(inside - seconds)


def op(start, end, device="/device:CPU:0", part="forward", **others):
    return Interval(device, part, 0, "op", "Op", start, end, **others)


@given(spans)
def test_lanes_hold_all_and_nothing_overlaps(own):
    ops = [op(a, b) for a, b in sorted(own)]
    found = lanes(ops)
    assert sorted(map(id, ops)) == sorted(id(one) for lane in found for one in lane)
    for lane in found:
        assert all(a.end <= b.start for a, b in itertools.pairwise(lane))


# Clocks ---------------------------------------------------------------------------

TASKS = ["a", "b", "c"]


@given(
    offsets=st.tuples(*[st.floats(-1e3, 1e3)] * 3),
    messages=st.lists(
        st.tuples(
            st.sampled_from(TASKS),
            st.sampled_from(TASKS),
            st.floats(0, 100),
            st.floats(1e-4, 1),
        ),
        max_size=20,
    ),
)
def test_aligned_clocks_break_no_order_and_are_as_near_as_messages_tell(
    offsets, messages
):
    of = dict(zip(TASKS, offsets, strict=True))
    # A message each way between a and each other task bounds it from both sides.
    there = {"b": 0.25, "c": 0.5}
    sent = [*messages]
    for task, latency in there.items():
        sent += [("a", task, 50.0, latency), (task, "a", 60.0, latency)]
    befores = [
        Before(first, time + of[first], then, time + late + of[then])
        for first, then, time, late in sent
        if first != then
    ]
    shift = align_clocks(befores, TASKS, "a")
    assert shift["a"] == 0
    for task, latency in there.items():
        true = of["a"] - of[task]
        assert abs(shift[task] - true) <= latency + 1e-6
    for first, first_time, then, then_time in befores:
        assert first_time + shift[first] <= then_time + shift[then] + 1e-6


def test_a_clock_bounded_from_one_side_moves_no_more_than_it_must():
    late = [Before("a", 10.0, "b", 3.0)]  # b is 7 s behind at least
    assert align_clocks(late, ["a", "b"], "a")["b"] == 7.0
    fine = [Before("a", 10.0, "b", 30.0)]
    assert align_clocks(fine, ["a", "b"], "a")["b"] == 0.0
    early = [Before("b", 30.0, "a", 10.0)]
    assert align_clocks(early, ["a", "b"], "a")["b"] == -20.0


def test_clocks_that_nothing_connects_stay():
    assert align_clocks([], ["b"], "a") == {"a": 0.0, "b": 0.0}


def test_a_clock_is_reached_over_another():
    befores = [
        *(Before("a", 1.0, "b", 101.0), Before("b", 101.0, "a", 1.0)),
        *(Before("b", 101.0, "c", 201.0), Before("c", 201.0, "b", 101.0)),
    ]
    assert align_clocks(befores, TASKS, "a") == {"a": 0.0, "b": -100.0, "c": -200.0}


# The choice of steps --------------------------------------------------------------


@given(
    ms=st.floats(0.5, 19.0),
    added=st.floats(0.0, 2.0),
    window_ms=st.floats(0.0, 60.0),
    wanted=st.integers(1, 30),
)
def test_recording_short_steps_adds_no_more_than_its_share(
    ms, added, window_ms, wanted
):
    pace, plain, extra, was_on = Pace(wanted), 0.0, 0.0, False
    for _ in range(4000):
        records = pace.records_next()
        if records and not was_on:
            # Whatever was added before has been worked off.
            assert extra <= SHARE * plain + 1e-6
        was_on = records
        plain += ms
        extra += added * ms * records
        pace.passed(ms * (1 + added * records), is_recorded=records)
        if records and pace.ends_window():
            was_on = False
            extra += window_ms
            pace.window_changed(window_ms)
    worst = (WINDOW * added * ms + window_ms) / SHARE / ms
    assert pace.is_done or worst * wanted / WINDOW > 3000


def test_long_steps_are_recorded_one_after_another():
    pace, recorded = Pace(4), []
    for _ in range(12):
        recorded.append(pace.records_next())
        pace.passed(LONG_MS, is_recorded=recorded[-1])
    assert recorded == [False] * PLAIN + [True] * 4 + [False] * 5
    assert pace.is_done
    assert not pace.is_sampled
    assert pace.cost == 0.0


def test_long_steps_that_recording_slows_down_are_sampled():
    pace, recorded = Pace(20), []
    for _ in range(100):
        recorded.append(pace.records_next())
        pace.passed(LONG_MS * (1.5 if recorded[-1] else 1.0), is_recorded=recorded[-1])
        if recorded[-1] and pace.ends_window():
            pace.window_changed(0.0)
    assert recorded[:PLAIN] == [False] * PLAIN
    assert pace.is_sampled
    # Five steps cost half a step each: 50 steps work that off at 5 %, the first 3 too.
    first = recorded.index(True)
    assert recorded[first : first + WINDOW + 47] == [True] * WINDOW + [False] * 47
    assert recorded[first + WINDOW + 47]


def test_devices_of_a_trace_file_are_in_the_order_of_their_numbers():
    own = [
        Interval(f"/device:CPU:{n}", "forward", None, "x", "MatMul", 1.0, 2.0)
        for n in (10, 2)
    ]
    step = RecordedStep(0, 0.0, 1.0, 2.0, tuple(own))
    names = [
        event["args"]["name"]
        for event in trace_of([step])["traceEvents"]
        if event["name"] == "process_name"
    ]
    assert names == ["program", "/device:CPU:2", "/device:CPU:10"]


def test_the_cost_leaves_the_first_step_out_which_traces():
    pace = Pace(2)
    for ms in (5000.0, 30.0, 30.0):
        pace.passed(ms, is_recorded=False)
    pace.passed(33.0, is_recorded=True)
    assert math.isclose(pace.cost, 0.1)


# Waits ----------------------------------------------------------------------------

A, B = "/device:CPU:0", "/device:CPU:1"


def reasons(step, device):
    return [(wait.start, wait.end, wait.why) for wait in waits(step, device)]


def test_a_gap_waits_for_what_came_last_in_it():
    ops = (op(1, 2), op(4, 5), op(0, 3.9, B, "backward"))
    came = (
        Arrival(A, B, "tower1/gradients/x", 2.5, 2.5),
        Arrival(A, B, "tower1/gradients/y", 3.9, 4.0),
        Arrival(B, A, "mean/z", 3.0, 3.0),
    )
    step = RecordedStep(0, 0, 0, 6, ops, came)
    assert reasons(step, A) == [
        (0, 1, "the call (Python, dispatch)"),
        (2, 4, "tower 1's backward from /device:CPU:1"),
        (5, 6, "the call's return"),
    ]
    assert explained(step) == 1.0


def test_after_the_last_arrival_a_gap_waits_for_a_core():
    came = (Arrival(A, B, "mean/z", 2, 2),)
    step = RecordedStep(0, 0, 0, 5, (op(0, 1), op(4, 5), op(0, 5, B)), came)
    assert reasons(step, A) == [(1, 2, "reduce from /device:CPU:1"), (2, 4, CORES)]


def named(name, part, start, end, device):
    return Interval(device, part, None, name, "Op", start, end)


def test_until_the_first_operation_of_all_devices_it_is_the_call():
    name = "tower1/w/ReadVariableOp"
    ops = (op(4, 5), named(name, "forward", 2.9, 3, B), op(5, 6, B))
    step = RecordedStep(0, 0, 0, 6, ops, (Arrival(A, B, name, 3, 3),))
    assert reasons(step, A)[:2] == [
        (0, 2.9, "the call (Python, dispatch)"),
        (2.9, 4, CORES),
    ]


def test_who_reads_a_variable_that_an_update_shares_waits_for_the_work_before():
    name = "apply_gradients/ReadVariableOp"
    got = named("IteratorGetNext", "input", 0, 2.9, B)
    ops = (op(4, 5), got, named(name, "apply", 3, 3.1, B))
    step = RecordedStep(0, 0, 0, 5, ops, (Arrival(A, B, name, 4, 4),))
    assert reasons(step, A) == [(0, 3.1, "input from /device:CPU:1"), (3.1, 4, CORES)]


def test_a_call_that_waits_for_work_elsewhere_names_the_work():
    name = "apply_gradients/tower1/StatefulPartitionedCall/input_control_node"
    ops = (op(4, 5), named("all_reduce/AddN", "reduce", 1, 4, B))
    step = RecordedStep(0, 0, 0, 5, ops, (Arrival(A, B, name, 4, 4),))
    assert (1, 4, "reduce from /device:CPU:1") in reasons(step, A)


def test_a_variable_elsewhere_is_waited_for_until_it_is_read():
    name = "tower1/w/ReadVariableOp"
    ops = (op(4, 5), op(0, 1, B), named(name, "forward", 3.8, 3.9, B))
    step = RecordedStep(0, 0, 0, 5, ops, (Arrival(A, B, name, 3.9, 4),))
    assert reasons(step, A) == [(0, 4, "tower 1's variables from /device:CPU:1")]


@pytest.mark.parametrize("is_far", [False, True])
def test_what_a_cpu_of_the_same_task_sent_waits_for_a_core(is_far):
    source = "/job:worker/task:1/device:CPU:0" if is_far else B
    came = (Arrival(A, source, "split", 1, 3), Arrival(A, source, "split_1", 2, 4))
    ops = (op(4, 5), named("split", "other", 0, 1, source), op(2, 3, source))
    step = RecordedStep(0, 0, 0, 5, ops, came)
    if is_far:
        found = [(0, 4, f"other from {source}")]
    else:
        found = [(0, 1, f"other from {B}"), (1, 4, CORES)]
    assert reasons(step, A) == found


def test_a_send_that_came_long_after_its_operation_waited_for_a_core():
    ops = (op(4, 5), named("split", "other", 0, 1, B), op(1, 4, B))
    step = RecordedStep(0, 0, 0, 5, ops, (Arrival(A, B, "split", 4, 4),))
    assert reasons(step, A) == [(0, 1, "other from /device:CPU:1"), (1, 4, CORES)]


def test_a_stretch_below_a_tenth_of_a_gap_counts_with_the_one_before():
    came = (Arrival(A, B, "mean/z", 3.95, 3.95),)
    step = RecordedStep(0, 0, 0, 5, (op(0, 1), op(4, 5), op(0, 5, B)), came)
    assert reasons(step, A) == [(1, 4, "reduce from /device:CPU:1")]


def test_time_before_the_call_is_the_programs():
    step = RecordedStep(0, 0, 3, 5, (op(3, 5),), (), (Call("IteratorGetNext", 0, 2.9),))
    why = "the program between steps (input, Python): IteratorGetNext"
    assert reasons(step, A) == [(0, 3, why)]


def test_a_tensor_that_waited_for_input_says_so():
    ops = (op(0, 4, B, "input"), op(4, 6, B), op(5, 6))
    came = (Arrival(A, B, "tower0/strided_slice", 4.5, 4.5),)
    step = RecordedStep(0, 0, 0, 6, ops, came)
    waited = (0, 4.5, "input from /device:CPU:1")
    assert reasons(step, A) == [waited, (4.5, 5, CORES)]


def test_what_a_towers_call_returns_is_of_what_it_did():
    ops = (op(1, 2), op(4, 5), op(0, 3.9, B, "backward"))
    came = (Arrival(A, B, "tower1/StatefulPartitionedCall", 3.9, 4.0),)
    step = RecordedStep(0, 0, 0, 6, ops, came)
    assert (2, 4, "tower 1's backward from /device:CPU:1") in reasons(step, A)


def test_where_nothing_came_the_next_operation_was_ready():
    step = RecordedStep(0, 0, 0, 4, (op(0, 1), op(3, 4)))
    assert reasons(step, A) == [(1, 3, CORES)]


def test_the_call_returns_when_the_other_device_has_ended():
    ops = (op(0, 1), op(0, 2.9, B, "apply"), op(2.9, 3, B, "input"))
    assert reasons(RecordedStep(0, 0, 0, 4, ops), A) == [
        (1, 3, "tower 0's apply on /device:CPU:1 to end the step"),
        (3, 4, "the call's return"),
    ]


def test_of_a_step_without_known_devices_nothing_is_explained():
    assert explained(RecordedStep(0, 0, 1, 4, (op(0, 1, ""),))) == 0.0


def test_a_gap_between_calls_is_the_programs():
    calls = (Call("f", 0, 1), Call("g", 3, 4))
    step = RecordedStep(0, 0, 0, 4, (op(0, 1), op(3, 4)), (), calls)
    assert reasons(step, A) == [(1, 3, "the program inside the step (Python)")]


def test_a_gap_of_which_nothing_is_known_is_not_explained():
    came = (Arrival(A, "", "x", 2.5, 2.5),)  # from where was not recorded
    step = RecordedStep(0, 0, 0, 4, (op(0, 1), op(3, 4)), came)
    assert reasons(step, A) == [(1, 2.5, ""), (2.5, 3, CORES)]
    assert explained(step) == 2.5 / 4


def test_the_summary_counts_what_runs_at_once_once():
    ops = (op(0, 2, num_bytes=10), op(1, 3, num_bytes=5), op(1, 2, part="apply"))
    table = summarize([RecordedStep(0, 0, 0, 4, ops)] * 2, cost=0.03, note="Sampled.")
    rows = {(row.part, row.waits_for): row for row in table.rows}
    forward = rows["forward", ""]
    assert (forward.ms, forward.share, forward.num_bytes) == (3000, 0.75, 15)
    assert rows["apply", ""].ms == 1000
    assert rows["wait", "the call's return"].ms == 1000
    assert table.explained == 1.0
    lines = str(table).splitlines()
    head = ["part", "device", "tower", "ms", "share", "bytes", "waits for"]
    assert re.split(r"  +", lines[0]) == head
    assert lines[-2:] == [
        "2 steps of 4000.00 ms; 100.0% explained; recording added 3.0%.",
        "Sampled.",
    ]

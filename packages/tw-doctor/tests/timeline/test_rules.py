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


CLOCKS = {
    "late by 7 at least": ([Before("a", 10.0, "b", 3.0)], {"a": 0.0, "b": 7.0}),
    "fine": ([Before("a", 10.0, "b", 30.0)], {"a": 0.0, "b": 0.0}),
    "early": ([Before("b", 30.0, "a", 10.0)], {"a": 0.0, "b": -20.0}),
    "unconnected": ([], {"a": 0.0, "b": 0.0}),
    "over another": (
        [
            *(Before("a", 1.0, "b", 101.0), Before("b", 101.0, "a", 1.0)),
            *(Before("b", 101.0, "c", 201.0), Before("c", 201.0, "b", 101.0)),
        ],
        {"a": 0.0, "b": -100.0, "c": -200.0},
    ),
}


@pytest.mark.parametrize(("befores", "shifts"), CLOCKS.values(), ids=CLOCKS)
def test_clocks_move_no_more_than_they_must(befores, shifts):
    assert align_clocks(befores, list(shifts), "a") == shifts


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


def named(name, part, start, end, device):
    return Interval(device, part, None, name, "Op", start, end)


ENDS = "to end the step"
CALL, RETURN = "the call (Python, dispatch)", "the call's return"
READ, UPDATE_READ = "tower1/w/ReadVariableOp", "apply_gradients/ReadVariableOp"
SENT = "apply_gradients/tower1/StatefulPartitionedCall/input_control_node"
INPUT = "input from /device:CPU:1"
FAR = "/job:worker/task:1/device:CPU:0"
# What runs until when (a step begins at 0), what arrives, and what A waits for.
WAITS = {
    "for what came last in the gap": (
        *(6, [op(1, 2), op(4, 5), op(0, 3.9, B, "backward")]),
        [
            Arrival(A, B, "tower1/gradients/x", 2.5, 2.5),
            Arrival(A, B, "tower1/gradients/y", 3.9, 4.0),
            Arrival(B, A, "mean/z", 3.0, 3.0),
        ],
        [(0, 1, CALL), (2, 4, f"tower 1's backward from {B}"), (5, 6, RETURN)],
    ),
    "for a core after the last arrival": (
        *(5, [op(0, 1), op(4, 5), op(0, 5, B)], [Arrival(A, B, "mean/z", 2, 2)]),
        [(1, 2, f"reduce from {B}"), (2, 4, CORES)],
    ),
    "for the call until the first operation of all devices": (
        *(6, [op(4, 5), named(READ, "forward", 2.9, 3, B), op(5, 6, B)]),
        [Arrival(A, B, READ, 3, 3)],
        [(0, 2.9, CALL), (2.9, 4, CORES), (5, 6, f"tower 0's forward on {B} {ENDS}")],
    ),
    "for the work before an update that shares a variable": (
        5,
        [
            op(4, 5),
            named("IteratorGetNext", "input", 0, 2.9, B),
            named(UPDATE_READ, "apply", 3, 3.1, B),
        ],
        [Arrival(A, B, UPDATE_READ, 4, 4)],
        [(0, 3.1, INPUT), (3.1, 4, CORES)],
    ),
    "for the work elsewhere that a call waits for": (
        *(5, [op(4, 5), named("all_reduce/AddN", "reduce", 1, 4, B)]),
        *([Arrival(A, B, SENT, 4, 4)], [(0, 1, CALL), (1, 4, f"reduce from {B}")]),
    ),
    "for a variable elsewhere until it is read": (
        *(5, [op(4, 5), op(0, 1, B), named(READ, "forward", 3.8, 3.9, B)]),
        [Arrival(A, B, READ, 3.9, 4)],
        [(0, 4, f"tower 1's variables from {B}")],
    ),
    **{
        f"for what {source} sent": (
            *(5, [op(4, 5), named("split", "other", 0, 1, source), op(2, 3, source)]),
            [Arrival(A, source, "split", 1, 3), Arrival(A, source, "split_1", 2, 4)],
            found,
        )
        for source, found in (
            (B, [(0, 1, f"other from {B}"), (1, 4, CORES)]),  # of the same task
            (FAR, [(0, 4, f"other from {FAR}")]),
        )
    },
    "for a core where a send came long after its operation": (
        *(5, [op(4, 5), named("split", "other", 0, 1, B), op(1, 4, B)]),
        [Arrival(A, B, "split", 4, 4)],
        [(0, 1, f"other from {B}"), (1, 4, CORES)],
    ),
    "for one thing where the other is below a tenth of the gap": (
        *(5, [op(0, 1), op(4, 5), op(0, 5, B)]),
        *([Arrival(A, B, "mean/z", 3.95, 3.95)], [(1, 4, f"reduce from {B}")]),
    ),
    "for input that a tensor waited for": (
        *(6, [op(0, 4, B, "input"), op(4, 6, B), op(5, 6)]),
        [Arrival(A, B, "tower0/strided_slice", 4.5, 4.5)],
        [(0, 4.5, INPUT), (4.5, 5, CORES)],
    ),
    "for what a tower's call did that returns": (
        *(6, [op(1, 2), op(4, 5), op(0, 3.9, B, "backward")]),
        [Arrival(A, B, "tower1/StatefulPartitionedCall", 3.9, 4.0)],
        [(0, 1, CALL), (2, 4, f"tower 1's backward from {B}"), (5, 6, RETURN)],
    ),
    "for a core where nothing came": (*(4, [op(0, 1), op(3, 4)], [], [(1, 3, CORES)]),),
    "for the end of another device": (
        *(4, [op(0, 1), op(0, 2.9, B, "apply"), op(2.9, 3, B, "input")], []),
        [(1, 3, f"tower 0's apply on {B} {ENDS}"), (3, 4, RETURN)],
    ),
    "for what is not known": (  # from where was not recorded
        *(4, [op(0, 1), op(3, 4)], [Arrival(A, "", "x", 2.5, 2.5)]),
        [(1, 2.5, ""), (2.5, 3, CORES)],
    ),
}


def reasons(step):
    return [(wait.start, wait.end, wait.why) for wait in waits(step, A)]


@pytest.mark.parametrize(("end", "ops", "came", "want"), WAITS.values(), ids=WAITS)
def test_a_gap_is_a_wait(end, ops, came, want):
    step = RecordedStep(0, 0, 0, end, tuple(ops), tuple(came))
    assert reasons(step) == want
    unknown = sum(until - since for since, until, why in want if not why)
    assert explained(step) == 1.0 - unknown / end


def test_gaps_before_and_between_calls_are_the_programs():
    step = RecordedStep(0, 0, 3, 5, (op(3, 5),), (), (Call("IteratorGetNext", 0, 2.9),))
    why = "the program between steps (input, Python): IteratorGetNext"
    assert reasons(step) == [(0, 3, why)]
    calls = (Call("f", 0, 1), Call("g", 3, 4))
    step = RecordedStep(0, 0, 0, 4, (op(0, 1), op(3, 4)), (), calls)
    assert reasons(step) == [(1, 3, "the program inside the step (Python)")]
    # Of a step without known devices nothing is explained.
    assert explained(RecordedStep(0, 0, 1, 4, (op(0, 1, ""),))) == 0.0


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

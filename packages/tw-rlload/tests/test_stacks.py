"""What can be trained on after loads that succeed, are refused, or fail."""

import logging
import threading

import numpy as np
import pytest

from tw_rlload._loading.buffers import Stacks
from tw_rlload._loading.load import LoadOptions
from tw_rlload._loading.specs import ColumnSpec

SPEC = ColumnSpec("x", np.dtype(np.float32), (), is_state=False)
ROWS = np.arange(8, dtype=np.float32)


class FakeWriter:
    """Records what is written; can fail, and can be held up."""

    def __init__(self, *, fails_at=None):
        self.calls, self.fails_at = [], fails_at
        self.may_write = threading.Event()
        self.may_write.set()

    def empty(self, stack):
        self.calls.append(("empty", stack))

    def write(self, stack, tower, column, rows):
        assert self.may_write.wait(30)
        if tower == self.fails_at:
            raise OSError("the device is gone")
        self.calls.append(("write", stack, tower, rows.tolist()))


def make(stacks=1, **changes):
    options = {
        "specs": (SPEC,),
        "num_devices": 2,
        "max_per_device_batch_size": 2,
        "tail": "drop",
        "check_finite": False,
        "stacks": stacks,
        **changes,
    }
    return Stacks(LoadOptions(**options), owner="Owner")


def load(stacks, rows=ROWS, writer=None):
    return stacks.load([rows], [], lambda: writer or FakeWriter(), caller="load")


def test_old_rows_are_freed_before_new_ones_are_written():
    writer = FakeWriter()
    load(make(), writer=writer)
    assert writer.calls == [
        ("empty", 0),
        ("write", 0, 0, [0, 1, 2, 3]),
        ("write", 0, 1, [4, 5, 6, 7]),
    ]


def test_there_is_nothing_to_train_on_before_a_load():
    with pytest.raises(RuntimeError, match=r"optimize: .*nothing has been loaded yet"):
        make().require("optimize")


def test_a_refused_load_touches_nothing_and_leaves_nothing_to_train_on():
    stacks, writer = make(), FakeWriter()
    load(stacks)
    with pytest.raises(ValueError, match="'x' is an array of object"):
        load(stacks, ROWS.astype(object), writer)
    assert writer.calls == []
    with pytest.raises(RuntimeError, match="the last load was refused"):
        stacks.require("optimize")
    load(stacks)
    assert stacks.require("optimize").report.rows_loaded == 8


def test_a_writer_that_cannot_be_had_leaves_nothing_to_train_on():
    stacks = make()
    load(stacks)

    def bind():
        raise ValueError("the session lacks a device")

    with pytest.raises(ValueError, match="the session lacks a device"):
        stacks.load([ROWS], [], bind, caller="load")
    with pytest.raises(RuntimeError, match="the last load was refused"):
        stacks.require("optimize")


def test_a_load_that_fails_half_way_is_freed_and_never_trained_on():
    stacks, writer = make(), FakeWriter(fails_at=1)
    load(stacks)
    with pytest.raises(OSError, match="the device is gone"):
        load(stacks, writer=writer)
    assert writer.calls == [("empty", 0), ("write", 0, 0, [0, 1, 2, 3]), ("empty", 0)]
    with pytest.raises(RuntimeError, match="the last load failed half-way"):
        stacks.require("optimize")
    assert stacks.loaded is None


def test_the_failure_itself_is_raised_when_freeing_fails_too(caplog):
    class Broken(FakeWriter):
        def empty(self, stack):
            raise RuntimeError("the session is closed")

    with pytest.raises(RuntimeError, match="the session is closed"):
        load(make(), writer=Broken())
    assert "could not free a half-loaded batch" in caplog.text


def test_the_next_batch_is_written_beside_the_current_one():
    stacks, writer = make(2), FakeWriter()
    load(stacks, writer=writer)
    writer.calls.clear()
    stacks.load_next([ROWS[:4]], [], writer, caller="load_next")
    assert stacks.require("optimize").report.rows_given == 8
    assert stacks.use_next(30, caller="use_next").report.rows_given == 4
    assert stacks.require("optimize").stack == 1
    assert {call[1] for call in writer.calls} == {1}
    stacks.load_next([ROWS], [], writer, caller="load_next")
    assert stacks.use_next(30, caller="use_next").stack == 0


def test_waiting_for_the_next_batch_ends_in_time_and_the_current_one_stays():
    stacks, writer = make(2), FakeWriter()
    load(stacks)
    writer.may_write.clear()
    stacks.load_next([ROWS[:4]], [], writer, caller="load_next")
    with pytest.raises(TimeoutError, match=r"use_next: .* still loading after 0.01 s"):
        stacks.use_next(0.01, caller="use_next")
    assert stacks.require("optimize").report.rows_given == 8
    with pytest.raises(RuntimeError, match="a load is under way"):
        load(stacks)
    with pytest.raises(RuntimeError, match="a load is under way"):
        stacks.load_next([ROWS], [], FakeWriter(), caller="load_next")
    writer.may_write.set()
    assert stacks.use_next(30, caller="use_next").report.rows_given == 4


def test_a_batch_refused_in_advance_leaves_the_current_one():
    stacks = make(2)
    load(stacks)
    with pytest.raises(ValueError, match="load_next: nothing was loaded"):
        stacks.load_next([ROWS.astype(object)], [], FakeWriter(), caller="load_next")
    assert stacks.require("optimize").report.rows_given == 8
    with pytest.raises(RuntimeError, match="no load is under way"):
        stacks.use_next(1, caller="use_next")


def test_a_failure_in_the_background_is_raised_and_leaves_nothing_to_train_on():
    stacks = make(2)
    load(stacks)
    stacks.load_next([ROWS], [], FakeWriter(fails_at=1), caller="load_next")
    with pytest.raises(RuntimeError, match=r"use_next: .*failed: the device is gone"):
        stacks.use_next(30, caller="use_next")
    with pytest.raises(RuntimeError, match="background failed: the device is gone"):
        stacks.require("optimize")
    load(stacks)
    assert stacks.require("optimize").report.rows_loaded == 8


def test_one_stack_cannot_load_in_the_background():
    with pytest.raises(RuntimeError, match="make the Owner with stacks=2"):
        make().load_next([ROWS], [], FakeWriter(), caller="load_next")


@pytest.mark.parametrize("stacks", [0, 3])
def test_there_are_one_or_two_stacks(stacks):
    with pytest.raises(ValueError, match=f"Owner: stacks must be 1, .*got {stacks}"):
        make(stacks)


def test_dropped_rows_are_said_once(caplog):
    stacks = make()
    load(stacks, ROWS[:7])
    load(stacks, ROWS[:5])
    assert caplog.text.count("were dropped") == 1
    assert "Owner: 3 of 7 rows" in caplog.text
    assert stacks.loaded.report.rows_dropped == 1


def test_the_memory_of_two_stacks_is_said_and_reported(caplog):
    stacks = make(2)
    with caplog.at_level(logging.INFO):
        stacks.load_next([ROWS], [], FakeWriter(), caller="load_next")
    report = stacks.use_next(30, caller="use_next").report
    assert (report.bytes_loaded, report.bytes_resident) == (32, 64)
    assert "two stacks hold up to" in caplog.text

"""What can be trained on after loads that succeed, are refused, or fail.

Imports private modules: no public name lets a test fail or hold up single writes.
"""

import threading

import numpy as np
import pytest

from tw_core import DeadlineError, towers
from tw_core.testing import CPUS
from tw_rlload._loading.buffers import Buffers
from tw_rlload._loading.specs import ColumnSpec

SPEC = ColumnSpec("x", np.dtype(np.float32), (), is_state=False)
ROWS = np.arange(8, dtype=np.float32)


class FakeWriter:
    """Records what is written; can fail, and can be held up."""

    def __init__(self, *, fails_at=None):
        self.calls, self.fails_at = [], fails_at
        self.may_write = threading.Event()
        self.may_write.set()

    def empty(self, buffer):
        self.calls.append(("empty", buffer))

    def write(self, buffer, tower, column, rows):
        assert self.may_write.wait(30)
        if tower == self.fails_at:
            raise OSError("the device is gone")
        self.calls.append(("write", buffer, tower, rows.tolist()))


def make(num_buffers=1):
    return Buffers(
        *("Owner", towers(list(CPUS[:2])), [SPEC]),
        max_per_device_batch_size=2,
        remainder="drop",
        check_finite=False,
        num_buffers=num_buffers,
    )


def load(buffers, rows=ROWS, writer=None, *, timeout_s=30.0):
    return buffers.load(
        *("load", [rows], [], lambda: writer or FakeWriter()), timeout_s=timeout_s
    )


def current(buffers):
    """What a call would train on now."""
    with buffers.training(object(), "optimize") as loaded:
        return loaded


def test_a_refused_load_touches_nothing_and_leaves_nothing_to_train_on():
    buffers, writer = make(), FakeWriter()
    load(buffers)
    with pytest.raises(ValueError, match="'x' is an array of object"):
        load(buffers, ROWS.astype(object), writer)
    assert writer.calls == []
    with pytest.raises(RuntimeError, match="the last load was refused"):
        current(buffers)
    load(buffers)
    assert current(buffers).report.rows_loaded == 8


def test_a_load_that_fails_half_way_is_freed_and_never_trained_on():
    buffers, writer = make(), FakeWriter(fails_at=1)
    load(buffers)
    with pytest.raises(OSError, match="the device is gone"):
        load(buffers, writer=writer)
    assert writer.calls == [("empty", 0), ("write", 0, 0, [0, 1, 2, 3]), ("empty", 0)]
    with pytest.raises(RuntimeError, match="the last load failed halfway"):
        current(buffers)
    assert buffers.report is None


def test_the_failure_itself_is_raised_when_freeing_fails_too(caplog):
    class Broken(FakeWriter):
        def empty(self, buffer):
            raise RuntimeError("the session is closed")

    with pytest.raises(RuntimeError, match="the session is closed"):
        load(make(), writer=Broken())
    assert "could not free a half-loaded batch" in caplog.text


def test_the_next_batch_is_written_beside_the_current_one():
    buffers, writer = make(2), FakeWriter()
    load(buffers, writer=writer)
    writer.calls.clear()
    buffers.load_next([ROWS[:4]], [], writer)
    assert current(buffers).report.rows_given == 8
    assert buffers.use_next(30).rows_given == 4
    assert current(buffers).buffer == 1
    assert {call[1] for call in writer.calls} == {1}
    buffers.load_next([ROWS], [], writer)
    buffers.use_next(30)
    assert current(buffers).buffer == 0


def test_waiting_for_the_next_batch_ends_in_time_and_the_current_one_stays():
    buffers, writer = make(2), FakeWriter()
    load(buffers)
    writer.may_write.clear()
    buffers.load_next([ROWS[:4]], [], writer)
    with pytest.raises(TimeoutError, match=r" still loading after 0.01 s"):
        buffers.use_next(0.01)
    assert current(buffers).report.rows_given == 8
    with pytest.raises(RuntimeError, match="A load is under way"):
        load(buffers)
    with pytest.raises(RuntimeError, match="A load is under way"):
        buffers.load_next([ROWS], [], FakeWriter())
    writer.may_write.set()
    assert buffers.use_next(30).rows_given == 4


def missing_in(report):
    lines = report.splitlines()
    return [line.split(None, 1)[1] for line in lines if line.startswith("  missing ")]


def test_a_load_that_takes_too_long_names_the_column_and_goes_on():
    buffers, writer = make(), FakeWriter()
    load(buffers)
    writer.may_write.clear()
    with pytest.raises(DeadlineError, match=r" after 0.2 s \(tower 0: column"):
        load(buffers, writer=writer, timeout_s=0.2)
    with pytest.raises(RuntimeError, match="takes too long; use_next waits for it"):
        current(buffers)
    with pytest.raises(RuntimeError, match="A load is under way"):
        load(buffers)
    with pytest.raises(DeadlineError, match="There is no batch to train on") as caught:
        buffers.use_next(0.1)
    first, second = missing_in(caught.value.report)
    assert first.startswith("tower 0: column 'x' for 0.")
    assert second == "tower 1: not started"
    assert "arrived   none" in caught.value.report
    writer.may_write.set()
    assert buffers.use_next(30).rows_given == 8
    assert current(buffers).report.rows_given == 8


def test_a_tower_that_is_filled_has_arrived_and_a_slow_check_is_told():
    class SlowSecond(FakeWriter):
        def write(self, buffer, tower, column, rows):
            if tower == 1:
                self.may_write.wait(30)

    buffers, writer = make(), SlowSecond()
    writer.may_write.clear()
    with pytest.raises(DeadlineError) as caught:
        load(buffers, writer=writer, timeout_s=0.2)
    assert "arrived   tower 0\n" in caught.value.report
    assert [line.split(" for ")[0] for line in missing_in(caught.value.report)] == [
        "tower 1: column 'x'"
    ]
    writer.may_write.set()
    buffers.use_next(30)
    may_bind = threading.Event()

    def bind():
        may_bind.wait(30)
        return FakeWriter()

    with pytest.raises(DeadlineError, match="all towers: checking the batch"):
        buffers.load("load", [ROWS], [], bind, timeout_s=0.1)
    may_bind.set()
    assert buffers.use_next(30).rows_given == 8


def test_a_load_without_a_bound_is_made_in_the_callers_thread():
    threads = []

    class Telling(FakeWriter):
        def empty(self, buffer):
            threads.append(threading.current_thread())

    load(make(), writer=Telling(), timeout_s=None)
    load(make(), writer=Telling())
    assert threads[0] is threading.current_thread()
    assert threads[1].daemon  # A load that hangs does not keep the process.


def test_a_batch_refused_in_advance_leaves_the_current_one():
    buffers = make(2)
    load(buffers)
    with pytest.raises(ValueError, match="batch rejected"):
        buffers.load_next([ROWS.astype(object)], [], FakeWriter())
    assert current(buffers).report.rows_given == 8
    with pytest.raises(RuntimeError, match="No load is under way"):
        buffers.use_next(1)


def test_a_failure_in_the_background_is_raised_and_leaves_nothing_to_train_on():
    buffers = make(2)
    load(buffers)
    buffers.load_next([ROWS], [], FakeWriter(fails_at=1))
    with pytest.raises(RuntimeError, match=r"failed: the device is gone"):
        buffers.use_next(30)
    with pytest.raises(RuntimeError, match="background failed: the device is gone"):
        current(buffers)
    load(buffers)
    assert current(buffers).report.rows_loaded == 8


def test_dropped_rows_are_said_once(caplog):
    buffers = make()
    load(buffers, ROWS[:7])
    load(buffers, ROWS[:5])
    assert caplog.text.count("were dropped") == 1
    assert "Owner: 3 of 7 rows" in caplog.text
    assert buffers.report.rows_dropped == 1

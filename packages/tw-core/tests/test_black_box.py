"""The recorder keeps the last events; a report tells all that is known of a hang."""

import itertools
import pickle
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_core import DeadlineError, _black_box
from tw_core._black_box import KEPT, MOST_FILES
from tw_core.internal import Recorder, Wait

WAIT = Wait(
    who="replica 0",
    what="the end of round 12",
    waited_s=3.25,
    deadline_s=3.0,
    arrived=("replica 0", "replica 2"),
    missing={"replica 1": "heard 3.4 s ago"},
    states={"replica 2": "has arrived in round 12, 3.1 s ago"},
)
NAMES = st.sampled_from(["tower 0", "tower 1", "rank 2"])
DONE = st.sampled_from(["began", "ended", "arrived"])
STEPS = st.lists(st.tuples(DONE, NAMES, st.sampled_from(["step", "load"])))


@pytest.fixture(autouse=True)
def first_file(monkeypatch):
    """Each test's process has written no file yet."""
    monkeypatch.setattr(_black_box, "_files", itertools.count(1))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TW_REPORTS", str(tmp_path / "reports"))
    return tmp_path / "reports"


def fail(wait=WAIT, recorder=None):
    error = DeadlineError("too late")
    assert _black_box.add_report(error, wait, recorder or Recorder("a task")) is error
    return error


def do(events, kind, who, what, number):
    if kind == "arrived":
        events.noted(kind, who, what, number)
    else:
        getattr(events, kind)(who, what, number)


@given(STEPS, st.integers(1, 60))
def test_the_last_events_are_kept_and_what_is_open_is_what_has_not_ended(steps, times):
    ticks = itertools.count()
    events = Recorder("a task", clock=lambda: float(next(ticks)))
    told, opened = [], {}
    for at, (kind, who, what) in enumerate(steps * times):
        do(events, kind, who, what, at)
        told.append((float(at), kind, who, what, at))
        if kind == "began":
            opened[who, what] = (float(at), who, what, at)
        elif kind == "ended":
            opened.pop((who, what), None)
    assert events.events == told[-KEPT:]
    assert events.open == sorted(opened.values())


def test_threads_that_note_events_at_once_lose_none():
    events, ready = Recorder("a task"), threading.Barrier(5)

    def work(name):
        ready.wait(10)
        for number in range(2000):
            with events.during(name, "step", number):
                pass
        events.began(name, "last")

    threads = [
        threading.Thread(target=work, args=(f"tower {k}",), daemon=True)
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    ready.wait(10)
    while any(thread.is_alive() for thread in threads):
        assert len(events.events) <= KEPT
        assert len(events.open) <= 8
    assert [
        (one.who, one.what) for one in sorted(events.open, key=lambda o: o.who)
    ] == [(f"tower {k}", "last") for k in range(4)]


def test_a_report_tells_the_wait_and_what_all_are_inside_of(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t-value")
    secret = "s3cr3t-local"
    other = Recorder("AsyncRunner of 2 towers", facts={"cluster": "ps 0 at host:1"})
    other.began("tower 1", "step", 37)
    gone = Recorder("short-lived")
    gone.began("tower 0", "step")
    own = Recorder("replica 0 of 3")
    own.noted("arrived", "replica 0", "round", 12)
    assert "short-lived" in _black_box.report(WAIT, own)
    del gone
    text = _black_box.report(WAIT, own, message="ReplicaTimeoutError: late\nvery")
    assert "s3cr3t" not in text and secret
    assert "short-lived" not in text
    parts = dict(part.split("\n", 1) for part in text.split("\n\n")[1:])
    wait = parts["The wait that missed its deadline"]
    for line in (
        "waiter    replica 0\n",
        "waits for the end of round 12\n",
        "3.2 s; deadline 3 s",
        "arrived   replica 0, replica 2\n",
        "missing   replica 1: heard 3.4 s ago\n",
        "error     ReplicaTimeoutError: late\n  error     very",
    ):
        assert line in wait
    assert "replica 2: has arrived in round 12" in parts["Where the others were"]
    inside = parts["Where this process was"]
    assert "AsyncRunner of 2 towers: tower 1: step 37 for " in inside
    assert inside.splitlines()[0] == "  nothing"
    assert "replica 0 arrived round 12" in parts["Last events of replica 0 of 3"]
    here = "test_a_report_tells_the_wait_and_what_all_are_inside_of"
    assert here in parts["Threads, innermost call first"]
    assert "Python 3." in parts["Versions"]
    assert "tw-core " in parts["Versions"]
    assert "cluster: ps 0 at host:1" in parts["Devices"]


@given(
    st.lists(NAMES, unique=True),
    st.dictionaries(st.text("abc ", min_size=1), st.text("xyz")),
)
def test_everyone_is_named_once_whether_they_came_or_not(arrived, missing):
    wait = Wait("me", "it", 1.0, 1.0, tuple(arrived), missing)
    lines = _black_box.report(wait, Recorder("a task")).splitlines()
    assert f"  arrived   {', '.join(arrived) or 'none'}" in lines
    told = [line for line in lines if line.startswith("  missing ")]
    assert told == [f"  missing   {who}: {why}" for who, why in missing.items()] or [
        "  missing   none"
    ]


def test_an_error_carries_its_report_and_names_the_file(folder, caplog):
    error = fail(recorder=Recorder("Replica 0 of 2, /a/b"))
    assert error.report_path.parent == folder
    assert error.report_path.name.startswith("replica-0-of-2-a-b-")
    assert error.report_path.read_text() == error.report
    assert "error     DeadlineError: too late" in error.report
    (note,) = error.__notes__
    assert str(error.report_path) in note
    assert note in caplog.text
    assert str(error) == "too late"
    again = pickle.loads(pickle.dumps(error))
    assert again.report == error.report


def test_a_process_writes_a_few_files_the_first_and_the_latest(folder):
    errors = [fail(Wait("me", f"round {n}", 1, 1)) for n in range(MOST_FILES + 3)]
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    kept = [*errors[: MOST_FILES - 1], errors[-1]]
    assert texts == [error.report for error in kept]


def test_a_folder_has_reports_where_one_is_wanted(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TW_REPORTS", "")
    error = fail()
    assert error.report_path is None
    assert "waiter    replica 0" in error.report
    assert "`report`" in error.__notes__[0]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("TW_REPORTS")
    assert fail().report_path.parent == tmp_path / "tw-reports"


def test_what_cannot_be_written_or_told_does_not_hide_the_error(monkeypatch, tmp_path):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("TW_REPORTS", str(blocked))

    def broken():
        raise OSError("no threads")

    monkeypatch.setattr(_black_box, "_threads", broken)
    error = fail()
    assert error.report_path is None
    assert "could not be described: OSError('no threads')" in error.report
    assert "could not be written to" in error.__notes__[0]
    assert "set TW_REPORTS" in error.__notes__[0]
    monkeypatch.setattr(_black_box, "report", broken)
    error = fail()
    assert error.report == ""
    assert "No report could be made" in error.__notes__[0]


ALONE = """
import sys
from tw_core import _black_box, _checks
from tw_core.internal import CallThread, Recorder, check_flag
def told():
    wait = _black_box.Wait("me", "it", 1.0, 1.0)
    return _black_box.report(wait, _black_box.Recorder("a task"))
assert "TensorFlow is not imported" in told()
assert "tensorflow" not in sys.modules
import tensorflow as tf
from tensorflow.python.eager import context
assert "eager runtime has not started" in told()
assert not context.context()._initialized
tf.constant(1.0)
assert "/device:CPU:0" in told(), told()
"""


@pytest.mark.slow
def test_a_report_and_what_it_needs_neither_import_nor_start_tensorflow():
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

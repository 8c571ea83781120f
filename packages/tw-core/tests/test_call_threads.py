"""Calls in a thread: what they return and raise, and how one is abandoned."""

import gc
import threading
import time

import pytest
from harness.processes import wait_until

from tw_core.internal import CallThread

DEADLINE_S = 20


def never():
    raise AssertionError("the call took no time, and was looked at")


def test_calls_return_and_raise_what_they_return_and_raise():
    thread = CallThread("calls")
    assert thread.run(lambda: 3, never, after_s=DEADLINE_S) == 3
    with pytest.raises(KeyError):
        thread.run(lambda: {}["x"], never, after_s=DEADLINE_S)
    ident = thread.run(threading.get_ident, never, after_s=DEADLINE_S)
    assert ident != threading.get_ident()
    assert thread.submit(threading.get_ident).result(DEADLINE_S) == ident
    with pytest.raises(KeyError):
        thread.submit(lambda: {}["x"]).result(DEADLINE_S)
    thread.end()


def test_a_long_call_is_looked_at_until_it_returns():
    thread, may_end, waits = CallThread("long"), threading.Event(), iter([0.01, 0.01])

    def check():
        wait_s = next(waits, None)
        if wait_s is None:
            may_end.set()
        return wait_s or DEADLINE_S

    assert thread.run(lambda: may_end.wait(DEADLINE_S), check, after_s=0.01)
    thread.end()


@pytest.mark.parametrize("error", [TimeoutError("late"), KeyboardInterrupt()])
def test_a_call_that_does_not_return_is_left_behind(error):
    thread, forever = CallThread("left"), threading.Event()

    def check():
        raise error

    with pytest.raises(type(error)):
        thread.run(lambda: forever.wait(DEADLINE_S), check, after_s=0.01)
    assert thread.is_abandoned
    with pytest.raises(RuntimeError, match="earlier call was abandoned; make another"):
        thread.run(lambda: 1, check, after_s=1)
    forever.set()
    expect_end_of("left")


def test_an_ended_thread_makes_the_calls_so_far_and_no_more():
    thread, seen = CallThread("ended"), []
    thread.submit(lambda: time.sleep(0.05))
    last = thread.submit(lambda: seen.append(1))
    thread.end()
    last.result(DEADLINE_S)
    assert thread.has_ended and seen == [1]
    with pytest.raises(RuntimeError, match="takes no more calls: it ended"):
        thread.submit(seen.clear)
    expect_end_of("ended")


def test_the_thread_enters_its_surroundings_and_ends_with_its_object():
    lock = threading.Lock()
    thread = CallThread("owned", surroundings=lock)
    assert thread.run(lock.locked, never, after_s=DEADLINE_S)
    del thread
    gc.collect()
    expect_end_of("owned")
    assert not lock.locked()


def expect_end_of(name):
    wait_until(lambda: name not in {one.name for one in threading.enumerate()})

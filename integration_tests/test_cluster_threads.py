"""Workers in threads: what went wrong in one of them is what a test shows."""

import threading
import time

import cluster_threads
import pytest
from cluster_threads import in_all_workers


class Local:
    """A cluster of three workers, without servers."""

    def __init__(self):
        self.addresses = {"worker": ("a", "b", "c")}

    def task(self, job, index):
        return index

    def target(self, job, index):
        return f"{job} {index}"


@pytest.fixture
def hang(monkeypatch):
    """Waits until the test is over, which has half a second."""
    over = threading.Event()
    monkeypatch.setattr(cluster_threads, "DEADLINE_S", 0.5)
    yield over.wait
    over.set()


def test_results_come_in_the_order_of_the_workers():
    found = in_all_workers(Local(), lambda task, target: (task, target))
    assert found == [(0, "worker 0"), (1, "worker 1"), (2, "worker 2")]


def test_an_error_is_raised_although_others_still_wait(hang):
    def work(task, target):
        if task == 2:
            raise ValueError("no such device")
        hang()

    with pytest.raises(ValueError, match="no such device"):
        in_all_workers(Local(), work)


def test_workers_that_still_run_are_named_after_one_deadline_for_all(hang):
    started = time.monotonic()
    with pytest.raises(AssertionError, match=r"\['worker 0', 'worker 1'\] still ran"):
        in_all_workers(Local(), lambda task, target: task == 2 or hang())
    assert time.monotonic() - started < 0.9

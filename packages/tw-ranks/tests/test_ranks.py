"""The groups of processes that tests drive answer the call that was made."""

import multiprocessing
import time
from typing import Any

import pytest
from harness import ranks


def answers_late(pipe: Any, options: Any) -> None:
    """Plays a rank that returns its argument, the first time after a second."""
    del options
    wait_s = 1.0
    while True:
        _, value = pipe.recv()
        time.sleep(wait_s)
        pipe.send(("returned", value))
        wait_s = 0.0


def test_a_late_answer_is_not_taken_for_the_next_calls(monkeypatch):
    group = ranks.Ranks(multiprocessing.get_context("fork"), 1, run=answers_late)
    try:
        monkeypatch.setattr(ranks, "DEADLINE_S", 0.2)
        with pytest.raises(TimeoutError, match="rank 0 said nothing for"):
            group.call("value", "first")
        monkeypatch.setattr(ranks, "DEADLINE_S", 20)
        with pytest.raises((BrokenPipeError, EOFError)):
            group.call("value", "second")
    finally:
        group.end()

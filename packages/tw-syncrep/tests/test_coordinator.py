"""Rank 0's end of the side channel, and ranks that are lost almost at once."""

import fcntl
import json
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from tw_syncrep.processes._attendance import Deadlines, Report
from tw_syncrep.processes._coordinator import Coordinator
from tw_syncrep.processes._member import Member
from tw_syncrep.processes._side_channel import Introduction, LineSocket

LIMITS = Deadlines(timeout_s=1.5, first_timeout_s=30.0)
SIZE = 4


class HandDriven:
    """A rank that says only what a test has it say."""

    def __init__(self, address, own):
        self.line = LineSocket(socket.create_connection(address, 10))
        self.line.send({"do": "hello", "hello": asdict(own)}, timeout_s=10)

    def beat(self):
        report = asdict(Report())
        self.line.send({"do": "beat", "report": report}, timeout_s=10)


def introduction(rank):
    return Introduction(rank, SIZE, f"h{rank}:1", f"h{rank}, process 1", "m", {})


@pytest.fixture
def channel():
    """Ranks 0 and 1, which live, and 2 and 3, which are driven by hand."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    coordinator = Coordinator(listener, SIZE, LIMITS)
    driven = [HandDriven(address, introduction(rank)) for rank in (2, 3)]
    with ThreadPoolExecutor(2) as pool:
        living = list(
            pool.map(
                lambda rank: Member(
                    address, introduction(rank), LIMITS, start_timeout_s=20
                ),
                (0, 1),
            )
        )
    for member in living:
        member.start(Report, lambda missing: None)
    yield living, driven
    for member in living:
        member.leave(timeout_s=1.0)
    coordinator.stop(timeout_s=5.0)
    for rank in driven:
        rank.line.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("tw-syncrep")]


def missing_by(living):
    return [sorted(member.wait_for_missing(20.0)) for member in living]


def test_ranks_that_fall_silent_together_are_named_together(channel):
    living, (two, three) = channel
    two.beat()
    time.sleep(0.3)
    three.beat()
    assert missing_by(living) == [[2, 3], [2, 3]]


def test_ranks_whose_connections_close_together_are_named_together(channel):
    living, (two, three) = channel
    two.line.close()
    time.sleep(0.3)  # The kernel is slow in ending this one.
    three.line.close()
    assert missing_by(living) == [[2, 3], [2, 3]]


def test_a_rank_among_thousands_is_sent_to():
    """``select.select`` takes no descriptor from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            low = socket.create_connection(listener.getsockname(), 10)
            theirs = listener.accept()[0]
        with low, theirs:
            number = fcntl.fcntl(low.fileno(), fcntl.F_DUPFD, 2048)
            high = LineSocket(socket.socket(fileno=number))
            high.send({"do": "beat"}, timeout_s=1.0)
            assert json.loads(theirs.recv(100)) == {"do": "beat"}
            with pytest.raises(TimeoutError, match=r"took nothing for 0.1 s"):
                high.send({"do": "x" * (1 << 25)}, timeout_s=0.1)
            high.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_answers_is_not_named(channel):
    living, (two, three) = channel
    two.line.close()
    time.sleep(0.15)  # Until rank 0 asks.
    three.beat()
    time.sleep(0.05)
    three.line.close()
    assert missing_by(living) == [[2], [2]]


def test_who_does_not_answer_in_time_is_not_waited_for(channel):
    living, (two, _) = channel
    began_s = time.monotonic()
    two.line.close()
    assert missing_by(living) == [[2], [2]]
    assert time.monotonic() - began_s < LIMITS.timeout_s  # Rank 3 is silent later.

"""Connections between ranks: outages, and what ranks see of each other."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from harness.rank_faults import send_proved
from harness.relays import Relay

from tw_launch._addresses import join_address
from tw_launch._channel import LineSocket
from tw_ranks._side_channel import _connections, _member
from tw_ranks._side_channel._attendance import Deadlines, Report
from tw_ranks._side_channel._connections import (
    Link,
    hold_connections,
    probe,
    retry_often,
)
from tw_ranks._side_channel._coordinator import Coordinator
from tw_ranks._side_channel._introduction import Introduction
from tw_ranks._side_channel._member import Member

LIMITS = Deadlines(timeout_s=5.0, first_timeout_s=30.0)
OUTAGE_S = 3.0
"""What is sent in it arrives, on its old connection, after the deadline."""
ON_LINUX = pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone"
)


class Network(Relay):
    """What is between a rank and rank 0: takes packets for a while, as if cut.

    As TCP does, it brings what was sent on an old connection only as long after the cut
    as that was; connections that are made in the cut do not come about.
    """

    _slow_until_s = _cut_s = 0.0

    def cut(self):
        self._cut_s = time.monotonic()
        super().cut()

    def heal(self):
        now_s = time.monotonic()
        self._slow_until_s = now_s + (now_s - self._cut_s)
        super().heal()

    def _serve(self, taken):
        if self._is_open.is_set():
            super()._serve(taken)
        else:
            self._ends.append(taken)  # As good as a lost SYN: never answered.

    def _pass_on(self, source, sink):
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._is_open.wait()
                if began_s < self._cut_s:
                    time.sleep(max(0.0, self._slow_until_s - time.monotonic()))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def introduction(rank, size=2, port=0):
    address = f"127.0.0.1:{port}" if port else ""
    task = f"host{rank}, process {rank}"
    return Introduction(rank, size, address, task, f"m{rank}", {})


@contextlib.contextmanager
def ranks(size, addresses=None, limits=LIMITS, ports=None):
    """Yields the members of a group whose rank 0 listens at the last address."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    networks = [Network(address[1]) for _ in range(size - 1)]
    own = [introduction(rank, size, (ports or {}).get(rank, 0)) for rank in range(size)]
    coordinator = Coordinator(listener, size, limits, own=own[0])
    places = [address, *(("localhost", network.port) for network in networks)]
    with ThreadPoolExecutor(size) as pool:
        members = list(
            pool.map(
                lambda rank: Member(
                    places[rank], own[rank], limits, start_timeout_s=20.0
                ),
                range(size),
            )
        )
    try:
        for member in members:
            member.start(Report, lambda missing: None)
        yield members, networks
    finally:
        for member in members:
            member.leave(timeout_s=1.0)
        coordinator.stop(timeout_s=5.0)
        for network in networks:
            network.end()
    assert not [t for t in threading.enumerate() if t.name.startswith("tw-ranks")]


@pytest.mark.slow
def test_an_outage_within_the_deadline_is_borne():
    with ranks(2) as (members, [network]):
        time.sleep(0.3)
        network.cut()
        time.sleep(OUTAGE_S)
        network.heal()
        time.sleep(LIMITS.timeout_s)
        assert [member.missing for member in members] == [{}, {}]
        members[0].tell("done")  # What was sent before arrives, and in order.
        members[1].wait_for("done")


@pytest.mark.slow
def test_what_is_said_in_an_outage_comes_once():
    with ranks(2) as (members, [network]):
        network.cut()
        for member in members:
            member.tell("a step")
        time.sleep(1.0)
        network.heal()
        for member in members:
            member.wait_for("a step")
            member.wait_for("a step")
        time.sleep(0.3)
        assert all(not member._told["a step"] for member in members)


@pytest.mark.slow
def test_a_longer_outage_is_told_on_both_sides():
    with ranks(3) as (members, [network, _]):
        network.cut()
        missing = [member.wait_for_missing(60.0) for member in members]
        network.heal()
    assert [sorted(one) for one in missing] == [[1], [0], [1]]
    assert missing[0][1].startswith("has been silent for ")
    assert "or this rank itself is cut off" in missing[1][0]


@pytest.mark.slow
def test_of_a_rank_that_gave_up_in_an_outage_this_is_told():
    """Its deadline has passed, rank 0's has not yet."""
    with ranks(2) as (members, [network]):
        network.cut()
        time.sleep(1.0)
        members[1]._give_up_rank_0(1.0)
        network.heal()
        told = members[0].wait_for_missing(60.0)[1]
    assert "has given up, as rank 0 sent nothing for 1.0 s" in told
    assert "before that it was silent for " in told


@pytest.mark.slow
def test_a_stranger_does_not_knock_for_a_rank():
    with ranks(2) as (members, [network]):
        network.cut()
        members[1]._ended.set()  # It says nothing more by itself.
        own = members[1].introductions[1]
        for other in (replace(own, task="a stranger"), replace(own, rank=7)):
            line = LineSocket(send_proved(members[0]._rank_0))
            report = asdict(Report(entered=9, made=99))
            said = {"do": "knock", "hello": asdict(other), "report": report}
            line.send(said, timeout_s=5.0)
            assert not line.wait(0.3) or line.receive() is None
            line.close()
        assert sorted(members[0].wait_for_missing(60.0)) == [1]


@contextlib.contextmanager
def listening(backlog=None):
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server:
        yield server, join_address(*server.getsockname())


@contextlib.contextmanager
def answering_nobody():
    """A port whose queue is full, so that Linux drops what asks to connect."""
    with contextlib.ExitStack() as stack:
        server, address = stack.enter_context(listening(backlog=0))
        for _ in range(3):
            held = stack.enter_context(socket.socket())
            held.setblocking(False)
            held.connect_ex(server.getsockname())
        yield address


def test_a_probe_tells_who_answers_and_why_others_do_not():
    with listening() as (_, good), answering_nobody() as silent:
        with listening() as (_, closed):
            pass
        seen = probe({1: good, 4: silent, 7: closed, 8: "no-such-host.invalid:1"})
    assert list(seen) == [1, 4, 7, 8]
    assert seen[1].fault == ""
    assert seen[4].fault == "timed out"
    assert seen[7].fault == "Connection refused"
    assert seen[8].fault
    assert probe({}) == {}


@ON_LINUX
def test_a_probe_tells_how_fast_data_comes_from_where():
    with contextlib.ExitStack() as stack:
        (server, slow), (idle_server, idle) = (
            stack.enter_context(listening()) for _ in range(2)
        )
        ends = []
        for one in (server, idle_server):
            near = socket.create_connection(one.getsockname())
            near.setblocking(False)
            ends.append(stack.enter_context(near))
            ends.append(stack.enter_context(one.accept()[0]))
        is_over = threading.Event()

        def send():
            while not is_over.wait(0.05):
                ends[1].sendall(bytes(1000))

        with ThreadPoolExecutor(1) as pool:
            pool.submit(send)
            seen = probe({1: slow, 2: idle})
            is_over.set()
    assert 0 < seen[1].bytes_per_s <= 20_000
    assert seen[2].bytes_per_s == 0


@ON_LINUX
def test_connections_of_others_in_this_process_are_held_and_no_more():
    def options(connection):
        named = (socket.TCP_USER_TIMEOUT, _connections._RTO_MAX_MS)
        return [connection.getsockopt(socket.IPPROTO_TCP, name) for name in named]

    with (
        listening() as (server, address),
        socket.create_connection(server.getsockname()) as near,
        listening() as (other, _),
        socket.create_connection(other.getsockname()) as unrelated,
    ):
        for one in (near, unrelated):
            one.setblocking(False)
        before = options(unrelated)
        hold_connections([address], 77.0)
        assert options(near)[0] == 77_000
        assert options(near)[1] in (1_000, 0)  # Linux before 6.15 has none.
        assert options(unrelated) == before
        near.send(b"still open")
        retry_often(unrelated, 1e9)
        assert options(unrelated)[0] == 2**31 - 1


def test_a_failed_collective_names_the_two_that_do_not_reach_each_other(monkeypatch):
    faults = {(2, 1): "Connection refused", (1, 2): "timed out"}  # by rank and peer

    def look(addresses):
        own = threading.current_thread().rank
        return {peer: Link(faults.get((own, peer), "")) for peer in addresses}

    def told(self):
        threading.current_thread().rank = self._own.rank
        return probe_(self)

    probe_ = Member._probe
    monkeypatch.setattr(_member, "probe", look)
    monkeypatch.setattr(Member, "_probe", told)
    with ranks(3, ports={0: 1, 1: 2, 2: 3}) as (members, _):
        # It fails as soon as it is inside, which no beat has told yet.
        members[2]._read_report = lambda: Report(entered=1)
        members[2].tell_failure()
        for member in members:
            assert member.wait_for_missing(60.0) == {
                1: "cannot reach rank 2: host2 does not answer host1 (127.0.0.1:3: "
                "timed out)",
                2: "waits for rank 1: host1 does not answer host2 (127.0.0.1:2: "
                "Connection refused)",
            }


@pytest.mark.slow
def test_a_collective_that_fails_though_all_are_reached_names_nobody(monkeypatch):
    with ranks(2, ports={0: 1, 1: 2}) as (members, _):
        monkeypatch.setattr(
            _member, "probe", lambda addresses: dict.fromkeys(addresses, Link())
        )
        members[1].tell_failure()
        assert members[0].wait_for_missing(2.5) == {}

"""Rank 0's end of the side channel, and ranks that are lost almost at once."""

import base64
import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from harness.rank_faults import NOISES, send_proved, send_raw
from harness.relays import Relay

from tw_launch import _reception
from tw_launch._channel import LineSocket, write_line
from tw_launch._key import prove
from tw_launch._reception import Reception, Refusal, Refusals
from tw_ranks._agreement import Exchange, TensorSpec, find_difference
from tw_ranks._side_channel import _coordinator, _member
from tw_ranks._side_channel._attendance import Attendance, Deadlines, Report
from tw_ranks._side_channel._coordinator import _FIRST_KEY, Coordinator
from tw_ranks._side_channel._introduction import RANK_0, Introduction
from tw_ranks._side_channel._member import AbsentError, Member
from tw_ranks._side_channel._packing import unpack, write_packed

LIMITS = Deadlines(timeout_s=6.0, first_timeout_s=30.0, warning_s=0.3)
SIZE = 4


class HandDriven:
    """A rank that says only what a test has it say."""

    def __init__(self, address, own):
        self.line = LineSocket(send_proved(address))
        self.line.send({"do": "hello", "hello": asdict(own)}, timeout_s=10)

    def beat(self, *counts):
        report = asdict(Report(*counts))
        self.line.send({"do": "beat", "report": report}, timeout_s=10)

    def wait_for(self, what):
        """Reads messages up to one of a kind."""
        told = []
        while what not in told:
            assert self.line.wait(20)
            told += [unpack(message)["do"] for message in self.line.receive()]


def introduction(rank):
    return Introduction(rank, SIZE, f"h{rank}:1", f"h{rank}, process 1", "m", {})


@pytest.fixture
def channel():
    """Ranks 0 and 1, which live, and 2 and 3, which are driven by hand."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    coordinator = Coordinator(listener, SIZE, LIMITS, own=introduction(0))
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
    assert not [t for t in threading.enumerate() if t.name.startswith("tw-ranks")]


def missing_by(living):
    return [sorted(member.wait_for_missing(60.0)) for member in living]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["silent", "closed"])
def test_ranks_that_are_lost_together_are_named_together(channel, monkeypatch, how):
    if how == "closed":
        monkeypatch.setattr(_coordinator, "_ANSWER_S", 5.0)
    living, (two, three) = channel
    for rank in (two, three):
        rank.beat() if how == "silent" else rank.line.close()
        if rank is two:
            time.sleep(0.3)  # The kernel is slow in ending one connection.
    assert missing_by(living) == [[2, 3], [2, 3]]


def test_rank_0_is_the_last_to_hear_who_is_missing(channel, monkeypatch):
    living, (_, three) = channel
    told, send_line = [], Coordinator._send_line

    def sent(self, rank, written):
        if unpack(json.loads(written))["do"] == "missing":
            told.append(rank)
        send_line(self, rank, written)

    monkeypatch.setattr(Coordinator, "_send_line", sent)
    three.line.close()
    assert missing_by(living) == [[3], [3]]
    assert told == [2, 1, 0]  # Its process may end then, and the thread that sends.


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
            with pytest.raises(TimeoutError, match=r"sent nothing for 0.1 s"):
                high.send({"do": "x" * (1 << 25)}, timeout_s=0.1)
            high.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_answers_is_not_named(channel, monkeypatch):
    monkeypatch.setattr(_coordinator, "_ANSWER_S", 60.0)
    living, (two, three) = channel
    two.line.close()
    three.wait_for("report")
    three.beat()
    three.wait_for("missing")
    three.line.close()
    assert missing_by(living) == [[2], [2]]


def test_who_does_not_answer_in_time_is_not_waited_for(channel):
    living, (two, _) = channel
    began_s = time.monotonic()
    two.line.close()
    assert missing_by(living) == [[2], [2]]
    assert time.monotonic() - began_s < LIMITS.timeout_s  # Rank 3 is silent later.


VERSIONS = {"TensorFlow": "2.21"}
PATIENT = Deadlines(timeout_s=20.0, first_timeout_s=30.0)


def of_run(rank, **changes):
    """What a rank of a group of two says of itself."""
    own = Introduction(rank, 2, f"h{rank}:1", f"p{rank}", "m", VERSIONS, "r", 1)
    return replace(own, **changes)


def hello(introduction):
    return {"do": "hello", "hello": asdict(introduction)}


@contextlib.contextmanager
def listening(own=None, place=("127.0.0.1", 0), key=""):
    """A coordinator of two ranks, of which none has come."""
    listener = socket.create_server(place, backlog=512)
    coordinator = Coordinator(listener, 2, PATIENT, own=own or of_run(0), key=key)
    try:
        yield listener.getsockname()
    finally:
        coordinator.stop(timeout_s=5.0)


@contextlib.contextmanager
def joined(address, others=(0, 1), key="", places=None):
    """Ranks that have come; they agree when they are asked to."""
    with ThreadPoolExecutor(2) as pool:

        def come(rank):
            place = (places or {}).get(rank, address)
            return Member(place, of_run(rank), PATIENT, start_timeout_s=20, key=key)

        members = list(pool.map(come, others))
        for member in members:
            member.start(Report, lambda missing: None)
        first, exchange = _FIRST_KEY, Exchange("sum", ())
        yield lambda: list(
            pool.map(lambda one: one.agree(exchange, 1)[0] - first, members, timeout=9)
        )
        for member in reversed(members):
            assert not member.missing
            member.leave(timeout_s=1.0)


def ask(address, introduction):
    """Returns what a rank is told that greets, up to the connection's end."""
    line = json.dumps(hello(introduction)).encode() + b"\n"
    with send_proved(address, line) as client, client.makefile("rb") as answers:
        return [json.loads(answer) for answer in answers]


def challenge(door):
    told = {"do": "challenge", "door": door, "nonce": "a", "has_key": False}
    return json.dumps(told).encode() + b"\n"


LINES = [
    *NOISES,
    json.dumps(hello(of_run(5))).encode() + b'\n{"do": "beat", "report": {}}\n',
    json.dumps(hello(of_run(1, run="s"))).encode() + b'\n{"do": "bye"}\n' * 3,
]


KEY = "0123456789abcdef" * 2


@pytest.mark.parametrize("key", ["", "o" * 32])
def test_who_has_not_the_key_takes_no_rank_and_learns_nothing(key, caplog):
    with listening(key=KEY) as address:
        with pytest.raises(ValueError, match=r"rank 0 has (a|another) key") as raised:
            Member(address, of_run(1), PATIENT, start_timeout_s=20, key=key)
        hers = json.dumps(hello(of_run(1))).encode() + b"\n"
        with send_raw(address, hers) as client, client.makefile("rb") as answers:
            told = answers.read()
        with joined(address, key=KEY) as agree:
            assert agree() == [0, 0]
    assert told.count(b"\n") == 2
    for secret in (KEY, "2.21", '"r"', "p0"):
        assert secret not in f"{raised.value}{told.decode()}"
    assert KEY not in caplog.text


def test_who_is_not_known_is_not_sent_why_it_is_refused(monkeypatch, caplog):
    """As one at another machine, without a key."""
    monkeypatch.setattr(_reception, "find_owner", lambda connection: None)
    with listening() as address:
        [answer] = ask(address, of_run(1, run="s"))
    assert answer["why"] == "rank 0 has refused this process; its log says why"
    assert "is from s, but rank 0 (p0) is from r" in caplog.text


@pytest.mark.parametrize("when", ["forming", "complete"])
def test_a_recorded_run_takes_no_rank(when):
    with listening(key=KEY) as address:
        relay = Relay(address[1])
        places = {1: ("localhost", relay.port)}
        with joined(address, key=KEY, places=places) as agree:
            assert agree() == [0, 0]
        relay.end()
    [sent] = relay.recorded.values()
    assert b"hello" in sent and b"agree" in sent
    with listening(key=KEY) as address, contextlib.ExitStack() as stack:
        if when == "complete":
            agree = stack.enter_context(joined(address, key=KEY))
        for message in (sent, *sent.splitlines(keepends=True)):
            with send_raw(address, message) as client, client.makefile("rb") as told:
                kinds = [json.loads(answer)["do"] for answer in told]
                assert kinds == ["challenge", "refused"]
        if when == "forming":
            agree = stack.enter_context(joined(address, key=KEY))
        assert agree() == [0, 0]


@pytest.mark.parametrize("when", ["forming", "complete"])
def test_what_strangers_send_ends_no_run(when):
    with listening() as address, contextlib.ExitStack() as stack:
        if when == "complete":
            agree = stack.enter_context(joined(address))
            assert agree() == [0, 0]
        for line in LINES:
            for send in (send_raw, send_proved):
                send(address, line).close()
                send(address, line[:-1]).close()
                stack.enter_context(send(address, line[:-1]))
        if when == "forming":
            agree = stack.enter_context(joined(address))
        first = agree()
        assert agree() == [first[0] + 1] * 2


def test_random_messages_of_a_rank_end_no_other_connection():
    """A rank that sends what is no message counts as lost, and is named."""
    with listening() as address:
        line = json.dumps(hello(of_run(1))).encode() + b"\n"
        with send_proved(address, line) as rank:
            own = Member(address, of_run(0), PATIENT, start_timeout_s=20)
            own.start(Report, lambda missing: None)
            report = {**asdict(Report()), "entered": "2"}
            message = {"do": "beat", "report": report}
            rank.sendall(json.dumps(message).encode() + b"\n")
            assert list(own.wait_for_missing(10.0)) == [1]
        own.leave(timeout_s=1.0)


def test_thousands_of_connections_keep_no_rank_out():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    try:
        with listening() as address, contextlib.ExitStack() as stack:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(1_000):
                stack.enter_context(send_raw(address, b'{"do": '))
            agree = stack.enter_context(joined(address))
            assert agree() == [0, 0]
            for _ in range(1_000):
                stack.enter_context(send_raw(address))
            assert agree() == [1, 1]
            # 2,000 of this test, and few of the coordinator's.
            assert len(os.listdir("/proc/self/fd")) - before < 2_200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_hundreds_of_ranks_that_come_at_once_do_not_keep_each_other_out():
    size = 200
    own = [replace(of_run(rank), size=size) for rank in range(size)]
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    coordinator = Coordinator(listener, size, PATIENT, own=own[0], key=KEY)
    address = listener.getsockname()
    with contextlib.ExitStack() as stack:
        stack.callback(coordinator.stop, timeout_s=5.0)
        ranks = [
            stack.enter_context(socket.create_connection(address, 10)) for _ in own
        ]
        for rank, comer in zip(ranks, own, strict=True):
            line = LineSocket(rank)
            prove(line, KEY, "rank 0", timeout_s=10)  # After all have connected.
            line.send(hello(comer), timeout_s=10)
        for rank in ranks:
            rank.settimeout(10)
            answers = stack.enter_context(rank.makefile("rb"))
            while unpack(json.loads(answers.readline()))["do"] != "welcome":
                pass


@pytest.mark.parametrize(
    ("comer", "says", "again"),
    [
        (of_run(1, run="s"), "rank 1 (p1) is from s, but rank 0 (p0) is from r", False),
        (of_run(1, run=""), "is from no named run, but rank 0 (p0) is from r", False),
        (of_run(1, run="s"), "of a job the same TW_RUN_ID", False),
        (of_run(1, start=0), "start 0 of r, but rank 0 (p0) to start 1", False),
        (of_run(1, start=2), "of the earlier start", True),
        (of_run(1, versions={"TensorFlow": "1"}), "TensorFlow 2.21, but rank", False),
        (of_run(0, task="x"), "p0 and x are both rank 0", False),
        (of_run(7), "rank must be 0 to 1", False),
        (of_run(1, size=3), "rank 0 expects 2 ranks", False),
        (of_run(1, address="x"), "does not recognise this as one of its ranks", False),
        (of_run(1, task="a\n"), "does not recognise this as one of its ranks", False),
    ],
)
def test_who_does_not_belong_here_is_refused_and_the_others_meet(comer, says, again):
    with listening() as address:
        [answer] = ask(address, comer)
        assert (answer["do"], answer["again"]) == ("refused", again)
        assert says in answer["why"]
        with joined(address) as agree:
            assert agree() == [0, 0]
            [answer] = ask(address, comer)
            assert answer["do"] == "refused"
            assert agree() == [1, 1]


def test_a_rank_of_the_next_start_waits_for_its_rank_0():
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        with listening() as address:
            later = of_run(1, start=2)
            coming = pool.submit(Member, address, later, PATIENT, start_timeout_s=20)
            [answer] = ask(address, later)
            assert answer["again"]
        stack.enter_context(listening(of_run(0, start=2), address))
        own = Member(address, of_run(0, start=2), PATIENT, start_timeout_s=20)
        for member in (coming.result(20), own):
            assert [one.start for one in member.introductions] == [2, 2]
            member.leave(timeout_s=1.0)


@pytest.mark.parametrize(
    "answer",
    [
        b"220 smtp\r\n",
        b'{"x": 1}\n',
        b'{"do": "welcome"}\n',
        b"[" * 9999 + b"\n",
        challenge("node 0"),
        challenge("rank 0") * 2,
    ],
)
def test_what_is_no_rank_0_is_named(answer):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        address = server.getsockname()
        coming = pool.submit(Member, address, of_run(1), PATIENT, start_timeout_s=20)
        with server.accept()[0] as connection:
            connection.sendall(answer)
            with pytest.raises(ValueError, match=r"127\.0\.0\.1:\d+ is not rank 0 "):
                coming.result(20)


def test_a_greeting_that_is_dropped_is_repeated():
    with listening() as place, ThreadPoolExecutor(2) as pool:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            coming = pool.submit(
                Member, address, of_run(1), PATIENT, start_timeout_s=20
            )
            server.accept()[0].close()
            with server.accept()[0] as connection:
                connection.sendall(challenge("rank 0"))
        with listening(place=address):
            own = Member(address, of_run(0), PATIENT, start_timeout_s=20)
            for member in (coming.result(20), own):
                member.leave(timeout_s=1.0)
        assert place != address


def test_beats_do_not_look_at_frames_of_the_running_program(monkeypatch):
    looked, has_beaten = [], threading.Semaphore(0)
    monkeypatch.setattr(_member, "_find_place", lambda: looked.append(1) or "here")
    own = replace(introduction(0), size=1)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    coordinator = Coordinator(listener, 1, PATIENT, own=own)
    member = Member(address, own, PATIENT, start_timeout_s=20)

    def read():
        has_beaten.release()
        return Report()

    member.start(read, lambda missing: None)
    has_come = [has_beaten.acquire(timeout=20.0) for _ in range(5)]
    member.leave(timeout_s=1.0)
    coordinator.stop(timeout_s=5.0)
    assert all(has_come) and not looked


def assert_lost_by(member, rank, fail):
    line = fail.__code__.co_firstlineno + 1
    says = "has lost its side-channel thread (LookupError: of nothing; "
    where = f"test_coordinator.py, line {line}, in fail)"
    assert member.wait_for_missing(60.0) == {rank: f"{says}{where}"}


def test_an_error_in_the_thread_of_a_rank_is_named_by_all(channel):
    living, _ = channel

    def fail():
        raise LookupError("of nothing")

    living[1].start(fail, lambda missing: None)
    for member in living:
        assert_lost_by(member, 1, fail)
    with pytest.raises(TimeoutError):
        living[1].agree(Exchange("a sum", ()))


def test_an_error_in_the_thread_of_rank_0_is_named_by_all(channel, monkeypatch):
    def fail(*_):
        raise LookupError("of nothing")

    monkeypatch.setattr(Attendance, "find_missing", fail)
    for member in channel[0]:
        assert_lost_by(member, 0, fail)


def test_an_agreement_has_a_deadline_though_rank_0_only_beats(channel, caplog):
    living, driven = channel
    living[1]._limits = Deadlines(6.0, first_timeout_s=0.5)
    with ThreadPoolExecutor(1) as pool:
        agreement = pool.submit(living[1].agree, Exchange("a sum", ()))
        while not agreement.done():
            for rank in driven:
                rank.beat()
            time.sleep(0.1)
    with pytest.raises(TimeoutError):
        agreement.result()
    assert living[1].missing == {0: "has not answered for 1 s"}
    assert re.search(
        r"rank 1 of 4 reports a stall: rank 0 \(h0, process 1\) has not "
        r"reached 'a sum' after 0\..* s; rank 1 is waiting there; it is outside "
        r"collectives, .* Ranks wait up to 30 s for a rank that answers\.",
        caplog.text,
    )


@pytest.mark.parametrize(("has_left", "level"), [(True, "DEBUG"), (False, "WARNING")])
def test_a_process_that_resets_its_connection_after_a_goodbye_has_ended_well(
    channel, caplog, has_left, level
):
    _, (two, three) = channel
    caplog.set_level("DEBUG")
    if has_left:
        bye = {"do": "bye", "report": asdict(Report()), "wait_s": 0.1}
        two.line.send(bye, timeout_s=10)
        heard = []
        while {"do": "bye"} not in heard:  # So that rank 0 sends it nothing more.
            assert two.line.wait(10)
            heard += two.line.receive()
    # The kernel does so where a process ends with messages unread.
    linger = struct.pack("ii", 1, 0)
    two.line.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    two.line.close()
    end_s = time.monotonic() + 10
    while "dropped a connection" not in caplog.text and time.monotonic() < end_s:
        three.beat()
        time.sleep(0.02)
    [record] = [r for r in caplog.records if "dropped a connection" in r.getMessage()]
    assert "ConnectionResetError" in record.getMessage()
    assert record.levelname == level


@pytest.mark.parametrize("leaver", [0, 1])
def test_who_leaves_waits_until_all_have_completed_its_last_exchange(channel, leaver):
    living, driven = channel
    other = living[1 - leaver]
    for member in living:
        member.start(lambda: Report(3, 3), lambda missing: None)
    for rank in driven:
        rank.beat(3, 2)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(living[leaver].leave, timeout_s=20.0)
        for rank, counts in zip(driven, [(3, 3), (3, 2)], strict=True):
            time.sleep(0.2)
            assert not leaving.done()
            rank.beat(*counts)
        time.sleep(0.2)
        assert not leaving.done()
        driven[1].beat(3, 3)
        leaving.result(10)
    assert other.missing == {}


def test_who_leaves_does_not_wait_for_long(channel):
    living, driven = channel
    for member in living:
        member.start(lambda: Report(3, 3), lambda missing: None)
    driven[0].beat(3, 2)
    began_s = time.monotonic()
    living[1].leave(timeout_s=0.5)
    assert time.monotonic() - began_s >= 0.5
    assert living[0].missing == {}


def test_who_has_left_is_named_by_those_who_wait_for_all_to_finish(channel):
    living, _ = channel
    living[1].leave(timeout_s=5.0)
    with pytest.raises(TimeoutError):
        living[0].follow(lambda: False, is_idle=True)
    assert living[0].missing == {1: "has ended, but others wait for it"}


def of(*names, kind="a broadcast"):
    """An exchange of a model's variables."""
    tensors = tuple(TensorSpec(name, "float32", (2,)) for name in names)
    return Exchange(kind, tensors, of_variables=True)


SAME, OTHER = of("a/kernel", "b"), of("a/kernel", "c")
RENAMED, LATER = of("a_1/kernel", "b"), of("a/kernel", kind="a sum")


@pytest.fixture
def asked(monkeypatch):
    """Ranks that rank 0 asks for their description."""
    found, send = [], Coordinator._send

    def sent(self, rank, message):
        if message["do"] == "describe":
            found.append(rank)
        send(self, rank, message)

    monkeypatch.setattr(Coordinator, "_send", sent)
    return found


@contextlib.contextmanager
def four(limits=PATIENT):
    """Four ranks that live."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    coordinator = Coordinator(listener, SIZE, limits, own=introduction(0))
    with ThreadPoolExecutor(SIZE) as pool:

        def come(rank):
            return Member(address, introduction(rank), limits, start_timeout_s=20)

        members = list(pool.map(come, range(SIZE)))
        for member in members:
            member.start(Report, lambda missing: None)
        yield members, pool
        for member in reversed(members):
            member.leave(timeout_s=1.0)
    coordinator.stop(timeout_s=5.0)


@pytest.mark.parametrize(
    ("described", "needed"),
    [
        ([SAME, SAME, SAME, SAME], []),
        ([SAME, SAME, OTHER, SAME], [0, 2]),
        ([SAME, LATER, OTHER, LATER], [0, 1]),
        ([OTHER, SAME, SAME, SAME], [0, 1]),
        ([SAME, SAME, RENAMED, RENAMED], [0]),
        ([SAME, RENAMED, SAME, LATER], [0, 3]),
    ],
)
def test_rank_0_asks_for_two_descriptions_at_most_and_says_what_all_would(
    asked, described, needed
):
    with four() as (members, pool):
        calls = [
            pool.submit(one.agree, exchange, 1)
            for one, exchange in zip(members, described, strict=True)
        ]
        faults = [str(call.exception(20) or "") for call in calls]
        assert faults == [find_difference(dict(enumerate(described)))] * SIZE
        assert sorted(asked) == needed
        if not any(faults):
            own = ("a/kernel", "b")
            renamed = [() if one == SAME else own for one in described]
            assert [call.result() for call in calls] == [
                (_FIRST_KEY, names) for names in renamed
            ]
        again = [pool.submit(one.agree, SAME, 1) for one in members]
        assert {call.result(20) for call in again} == {(_FIRST_KEY + 1, ())}


def test_named_exchanges_are_answered_at_once_unless_they_differ(asked):
    with four() as (members, _):
        one, other = (replace(exchange, name="x") for exchange in (SAME, OTHER))
        keys = [members[rank].agree(one, 1, by_name=True) for rank in (3, 1)]
        assert keys == [(_FIRST_KEY, ())] * 2
        assert asked == []
        says = find_difference({0: other, 1: one, 3: one})
        with pytest.raises(ValueError, match=re.escape(says)):
            members[0].agree(other, 1, by_name=True)
        assert sorted(asked) == [0, 1]
        assert members[3].wait_for_missing(20.0) == {0: says}


def test_a_rank_that_follows_is_sent_an_exchange_once(asked):
    with four() as (members, pool):
        heard, hear = [], Member._hear

        def note(self, messages):
            heard.extend(m for m in messages or () if m["do"] == "followed")
            hear(self, messages)

        for member in members:
            member._hear = note.__get__(member)
        following = pool.submit(members[2].follow, lambda: False, is_idle=False)
        calls = []
        for rank in (0, 1, 3):
            calls.append(pool.submit(members[rank].agree, SAME, 1))
            assert following.result(20) == SAME
        calls.append(pool.submit(members[2].agree, SAME, 1))
        assert {call.result(20) for call in calls} == {(_FIRST_KEY, ())}
        assert len(heard) == len(asked) == 1


def test_a_rank_that_describes_another_exchange_than_its_digest_is_lost(caplog):
    with listening() as address, contextlib.ExitStack() as stack:
        rank = stack.enter_context(send_proved(address, write_packed(hello(of_run(1)))))
        own = Member(address, of_run(0), PATIENT, start_timeout_s=20)
        own.start(Report, lambda missing: None)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        agreement = pool.submit(own.agree, SAME, 1)
        digest = asdict(OTHER.digest)
        rank.sendall(
            write_packed({"do": "agree", "number": 0, "digest": digest, "keys": 1})
            + write_packed(
                {"do": "description", "number": 0, "exchange": asdict(LATER)}
            )
        )
        while b'"describe"' not in rank.recv(1 << 16):
            pass
        rank.sendall(
            write_packed({"do": "description", "number": 0, "exchange": asdict(LATER)})
        )
        assert list(own.wait_for_missing(10.0)) == [1]
        assert isinstance(agreement.exception(10), TimeoutError)
        own.leave(timeout_s=1.0)
    assert "rank 1 has described 'a sum' of a/kernel" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("where", ["_read", "_look"])
def test_what_rank_0_could_not_read_is_no_silence_of_others(
    channel, monkeypatch, where
):
    living, driven = channel
    go_on, delays = getattr(Coordinator, where), [1.5]

    def busy(self, *line):
        if delays:
            time.sleep(delays.pop())  # As a call in C that holds Python's lock.
        go_on(self, *line)

    for rank in driven:
        rank.beat()
    monkeypatch.setattr(Coordinator, where, busy)
    while delays:
        time.sleep(0.01)
    for _ in range(3):
        time.sleep(0.6)
        for rank in driven:
            rank.beat()
    time.sleep(0.1)
    driven[1].line.close()
    missing = living[0].wait_for_missing(20.0)
    assert missing == {3: "has closed its connection: its process has ended"}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["wait", "report"])
def test_what_a_rank_could_not_read_is_no_silence_of_rank_0(monkeypatch, where):
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    coordinator = Coordinator(listener, 1, PATIENT, own=replace(of_run(0), size=1))
    member = Member(address, replace(of_run(0), size=1), PATIENT, start_timeout_s=20)
    delays, wait = [1.5], LineSocket.wait

    def be_busy(of):
        if where == of and delays:
            time.sleep(delays.pop())
            coordinator.stop(timeout_s=5.0)  # Its last words came before.

    def wait_and_be_busy(self, timeout_s):
        has_come = wait(self, timeout_s)
        if not has_come:
            be_busy("wait")
        return has_come

    def read():
        be_busy("report")
        return Report()

    monkeypatch.setattr(LineSocket, "wait", wait_and_be_busy)
    member.start(read, lambda missing: None)
    missing = member.wait_for_missing(20.0)
    assert missing == {0: "has closed its connection: its process has ended"}
    member.leave(timeout_s=1.0)


class Full(socket.socket):
    """Accepts one connection; then its process has no file descriptor left."""

    has_accepted = False

    def accept(self):
        if self.has_accepted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.has_accepted = True
        return super().accept()


@pytest.mark.slow
def test_a_rank_0_that_can_accept_no_more_says_so():
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = Full(fileno=server.detach())
    coordinator = Coordinator(listener, 2, PATIENT, own=of_run(0))
    address = listener.getsockname()
    says = (
        "rank 1 did not join within 3 s: rank 0 cannot accept their connections "
        r"\(Too many open files; its process may open \d+\)"
    )
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(Member, address, of_run(0), PATIENT, start_timeout_s=3.0)
        # A connection that has not proved to be a rank's would be closed for the next.
        while not coordinator._introductions:
            time.sleep(0.01)
        socket.create_connection(address).close()
        with pytest.raises(AbsentError, match=says):
            first.result(20)
    coordinator.stop(timeout_s=5.0)


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((64, 4096), (556, 4096)), ((64, 200), (200, 200)), ((1024, 4096), None)],
)
def test_the_soft_limit_of_open_files_is_raised_as_far_as_is_needed(
    monkeypatch, limits, raised
):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: found.append(pair))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Coordinator(listener, 100, PATIENT, own=of_run(0)).stop(timeout_s=5.0)
    assert found == [raised] * (raised is not None)


def test_rank_0s_refusal_cannot_control_the_terminal():
    refused = {"do": "refused", "why": "no\x1b[2J\nrank 1 failed", "again": False}

    def refuse(peer, lines):
        raise Refusal("no", write_line(refused))

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    settings = {"door": RANK_0, "key": "", "refusals": Refusals(print)}
    reception = Reception(listener, refuse, **settings)
    with contextlib.closing(reception), ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Member, address, of_run(1), PATIENT, start_timeout_s=10)
        while not joining.done():
            reception.receive(0.02)
        with pytest.raises(ValueError, match=r"no\\x1b\[2J\\nrank 1 failed"):
            joining.result()


def test_a_rank_0_that_may_not_open_a_file_for_each_rank_refuses(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ValueError, match=r"each of 64 ranks, .* 64 files; .*ulimit -Hn"),
    ):
        Coordinator(listener, 64, PATIENT, own=of_run(0))


@pytest.mark.parametrize("words", [1, 10_000])
def test_long_messages_are_packed_and_read_as_they_were(words):
    message = {"do": "missing", "missing": {"3": "gone " * words}}
    line = write_packed(message)
    assert unpack(json.loads(line)) == message
    assert len(line) < 2_000


DEEP = base64.b64encode(zlib.compress(b"[" * 100_000)).decode()


@pytest.mark.parametrize("packed", ["?", "AAAA", "eJyrVkrMSVWqBQAQfQPP", DEEP, None, 3])
def test_what_is_no_packed_message_is_refused(packed):
    with pytest.raises(ValueError, match=r"expected|base64"):
        unpack({"do": "packed", "message": packed})

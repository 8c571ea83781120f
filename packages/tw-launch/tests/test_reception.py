"""Who is admitted at a port, and what strangers can do there."""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_launch import _key, _reception
from tw_launch._channel import LineSocket, write_line, write_printable
from tw_launch._key import KeyMismatchError, prove
from tw_launch._reception import Reception, Refusal, Refusals

KEY, OTHER = "k" * 32, "o" * 32
DOOR = "rank 0"


class Served:
    """A reception in a thread, which admits any peer that says "hello"."""

    def __init__(self, key=KEY, place=("127.0.0.1", 0), family=socket.AF_INET):
        dual = place[0] == "::"
        listener = socket.create_server(
            place, family=family, backlog=512, dualstack_ipv6=dual
        )
        self.address = listener.getsockname()[:2]
        self.admitted, self.logged, self.known = [], [], []
        self.reception = Reception(
            listener, self._admit, door=DOOR, key=key, refusals=Refusals(self._log)
        )
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _log(self, why):
        self.logged.append(why)

    def _serve(self):
        while not self._is_over.is_set():
            self.reception.receive(0.02)

    def _admit(self, peer, lines):
        self.known.append(peer.is_known)
        if lines[0] != b"hello":
            raise Refusal("the run is secret-run", b"no\n" if peer.is_known else None)
        self.admitted.append(peer.line)
        peer.line.send_line(b"welcome\n", timeout_s=1.0)
        return True

    def end(self):
        self._is_over.set()
        self._thread.join(10)
        self.reception.close()
        for line in self.admitted:
            line.close()


@contextlib.contextmanager
def served(*arguments, **settings):
    one = Served(*arguments, **settings)
    try:
        yield one
    finally:
        one.end()


def connect(address, line=b"hello\n", key=KEY, door=DOOR):
    """Returns what a client is sent, up to the end if it is refused."""
    with socket.create_connection(address, 10) as client:
        prove(LineSocket(client), key, door, timeout_s=10)
        client.settimeout(10)
        client.sendall(line)
        return client.makefile("rb").readline()


def read_all(client):
    """Returns what is sent until the connection ends."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while data := client.recv(1 << 16):
            told += data
    return told


@pytest.mark.parametrize("key", [KEY, ""])
def test_both_ends_with_one_key_meet(key):
    with served(key) as one:
        assert connect(one.address, key=key) == b"welcome\n"
        assert connect(one.address, b"x\n", key=key) == b"no\n"
    assert one.logged == ["the run is secret-run"]


@pytest.mark.parametrize(
    ("theirs", "ours", "says"),
    [
        (KEY, OTHER, "rank 0 has another key"),
        (KEY, "", "rank 0 has a key, and this process has none"),
        ("", KEY, "this process has a key, and rank 0 has none"),
    ],
)
def test_ends_with_different_keys_do_not(theirs, ours, says):
    with served(theirs) as one, pytest.raises(KeyMismatchError, match=says):
        connect(one.address, key=ours)
    assert not one.admitted
    assert not any(key and key in "".join(one.logged) for key in (theirs, ours))


def test_the_proof_for_one_door_opens_no_other():
    with served() as one, pytest.raises(ValueError, match="no door for node 0"):
        connect(one.address, door="node 0")
    # Nor if the client is deceived about the name.
    with served() as one, socket.create_connection(one.address, 10) as client:
        lines = client.makefile("rb")
        nonce = json.loads(lines.readline())["nonce"]
        proof = _key.sign(KEY, "client", "node 0", "a", nonce)
        client.sendall(write_line({"do": "prove", "nonce": "a", "proof": proof}))
        assert json.loads(lines.readline())["do"] == "refused"


def record(key=KEY):
    """Returns all that a client has sent and received in a whole run."""
    sent = bytearray()
    with served(key) as one, socket.create_connection(one.address, 10) as client:
        lines = client.makefile("rb")
        challenge = lines.readline()
        nonce = json.loads(challenge)["nonce"]
        proof = _key.sign(key, "client", DOOR, "a", nonce)
        sent += write_line({"do": "prove", "nonce": "a", "proof": proof}) + b"hello\n"
        client.sendall(sent)
        received = challenge + lines.readline() + lines.readline()
    assert received.endswith(b"welcome\n")
    return bytes(sent), received


RECORDED = record()


def test_a_recorded_run_admits_nobody_to_the_next():
    sent, _ = RECORDED
    with served() as one:
        for part in (sent, sent[sent.index(b"\n") + 1 :], sent * 2):
            with socket.create_connection(one.address, 10) as client:
                client.sendall(part)
                told = read_all(client)
            kinds = [json.loads(line)["do"] for line in told.splitlines()]
            assert kinds == ["challenge", "refused"]
            assert b"secret-run" not in told and KEY.encode() not in told
    assert not one.admitted and not one.known


def test_a_recorded_server_deceives_no_rank():
    _, received = RECORDED
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        coming = pool.submit(connect, server.getsockname())
        with server.accept()[0] as client:
            challenge, proved, _ = received.splitlines(keepends=True)
            client.sendall(challenge)
            client.recv(1 << 16)
            client.sendall(proved)
            with pytest.raises(KeyMismatchError, match="may be a stranger's"):
                coming.result(10)


def test_a_servers_refusal_cannot_control_the_terminal():
    refused = {"do": "refused", "why": "no\x1b[2J\nworker 1 failed" + "x" * 60_000}
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        coming = pool.submit(connect, server.getsockname())
        with server.accept()[0] as client:
            client.sendall(write_line(refused))
            with pytest.raises(KeyMismatchError, match=r"no\\x1b\[2J\\nw") as raised:
                coming.result(10)
    assert len(str(raised.value)) < 1000


@given(st.data())
def test_mutated_frames_of_a_recorded_run_admit_nobody(mutants, data):
    sent = bytearray(RECORDED[0])
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(sent) - 1))
        sent[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary())
    with socket.create_connection(mutants.address, 10) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        told = read_all(client)
    assert [json.loads(line)["do"] for line in told.splitlines()][1:] in (
        ["refused"],
        [],  # It was no whole line.
    )
    assert not mutants.admitted


@pytest.fixture(scope="module")
def mutants():
    with served() as one:
        yield one


@pytest.mark.parametrize("key", [KEY, ""])
def test_floods_and_silence_keep_nobody_out(key, monkeypatch):
    monkeypatch.setattr(_reception, "STRANGER_S", 60.0)
    with served(key) as one, contextlib.ExitStack() as stack:
        for _ in range(300):
            silent = socket.create_connection(one.address, 10)
            stack.enter_context(silent)
        assert connect(one.address, key=key) == b"welcome\n"
        assert len(one.reception._strangers) <= _reception.MOST_STRANGERS
        endless = stack.enter_context(socket.create_connection(one.address, 10))
        with pytest.raises(OSError):
            for _ in range(1000):
                endless.sendall(b"x" * (1 << 16))
        assert connect(one.address, key=key) == b"welcome\n"
    assert any("longer than 65536 bytes" in why for why in one.logged)


def test_a_stranger_is_dropped_in_time(monkeypatch):
    monkeypatch.setattr(_reception, "STRANGER_S", 0.3)
    with served() as one, socket.create_connection(one.address, 10) as client:
        began_s = time.monotonic()
        client.sendall(b'{"do": ')
        assert read_all(client).count(b"\n") == 1
        assert 0.2 < time.monotonic() - began_s < 5.0
    assert not one.logged  # A check of a port is no attack.


def test_an_answer_that_nobody_reads_delays_nobody():
    class Slow(Served):
        def _admit(self, peer, lines):
            if lines[0] == b"hello":
                return super()._admit(peer, lines)
            raise Refusal("so long", b"x" * (1 << 26))

    one = Slow("")
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(one.address)
            prove(LineSocket(client), "", DOOR, timeout_s=10)
            client.settimeout(10)
            client.sendall(b"x\n")
            began_s = time.monotonic()
            assert connect(one.address, key="") == b"welcome\n"
            assert time.monotonic() - began_s < 3.0
    finally:
        one.end()


def test_the_log_has_a_few_lines_then_counts():
    lines = []
    refusals = Refusals(lines.append)
    for number in range(1000):
        refusals.note(f"no {number}\x1b[2J\n")
    assert lines[0] == r"no 0\x1b[2J\n"
    assert lines[4].endswith("; from now on only counted")
    assert [line.partition("; ")[2] for line in lines[5:]] == [
        "10 connections so far",
        "100 connections so far",
        "1000 connections so far",
    ]
    assert all(line.isprintable() for line in lines)


def test_names_are_written_printable_and_short():
    assert write_printable("a\x1b]0;b\x07é\ud800") == r"a\x1b]0;b\x07é\ud800"
    assert write_printable("a" * 9, 3) == "aaa..."


def say_as_nobody(address):
    """Returns what another user of this machine is answered; only root can ask."""
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(OSError):
            os.setuid(65534)
            with socket.create_connection(address, 10) as client:
                client.sendall(b"hello\n")
                os.write(theirs, client.recv(1000))
        os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    with open(ours, "rb") as told:
        return told.read()


@pytest.mark.skipif(sys.platform != "linux", reason="sock_diag(7)")
def test_who_listens_at_a_peers_port_does_not_own_the_peer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = server.getsockname(), ("127.0.0.1", 9)
        assert _reception._ask_kernel(socket.AF_INET, *ends) is None


@pytest.mark.skipif(sys.platform != "linux", reason="sock_diag(7)")
@pytest.mark.parametrize(
    ("place", "hosts"),
    [("127.0.0.1", ["127.0.0.1"]), ("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])],
)
def test_without_a_key_other_users_are_refused_on_loopback(place, hosts, monkeypatch):
    family = socket.AF_INET6 if ":" in place else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            one = stack.enter_context(served(None, (place, 0), family))
            addresses = [(host, one.address[1]) for host in hosts]
            for address in addresses:
                socket.create_connection(address, 10).close()
        except OSError:
            pytest.skip("no IPv6 here")
        for address in addresses:
            with socket.create_connection(address, 10) as client:
                client.sendall(b"hello\n")
                assert client.recv(100) == b"welcome\n"
            if os.geteuid() == 0:
                assert b"refused" in say_as_nobody(address)
                assert "it belongs to user 65534" in one.logged[-1]
        monkeypatch.setattr(os, "geteuid", lambda: -1)
        with socket.create_connection(addresses[0], 10) as client:
            client.sendall(b"hello\n")
            assert b"refused" in client.recv(1000)
    assert all(one.known)


@pytest.mark.skipif(sys.platform != "linux", reason="sock_diag(7)")
def test_a_peer_from_another_address_of_this_machine_has_its_user():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # Sends nothing.
        except OSError:
            pytest.skip("no other address here")
        other = asked.getsockname()[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        with socket.create_connection(place, 10, (other, 0)) as client:
            connection, _ = server.accept()
            with connection:
                assert client.getsockname()[0] == other
                assert _reception.find_owner(connection) == os.geteuid()


def test_a_peer_that_has_closed_its_end_has_no_user(monkeypatch):
    with served(None) as one:
        socket.create_connection(one.address, 10).close()
        with socket.create_connection(one.address, 10) as client:
            client.sendall(b"hello\n")
            assert client.recv(100) == b"welcome\n"
        ask, asked = _reception._ask_kernel, []
        monkeypatch.setattr(
            _reception,
            "_ask_kernel",
            lambda *ends: None if asked.append(1) or len(asked) == 1 else ask(*ends),
        )
        with socket.create_connection(one.address, 10) as client:
            client.sendall(b"hello\n")
            assert b"refused" in client.recv(1000)
        monkeypatch.setattr(_reception, "_ask_kernel", lambda *_: None)
        with socket.create_connection(one.address, 10) as client:
            client.sendall(b"hello\n")  # Of a system that does not show it.
            assert client.recv(100) == b"welcome\n"
    assert one.known[-1] is False


def test_a_reception_is_readable_when_it_has_work():
    listener = socket.create_server(("127.0.0.1", 0))
    reception = Reception(
        listener, lambda *_: True, door=DOOR, key="", refusals=Refusals(print)
    )
    with selectors.DefaultSelector() as selector:
        selector.register(reception, selectors.EVENT_READ)
        assert not selector.select(0)
        with socket.create_connection(listener.getsockname(), 10):
            assert selector.select(10)
            reception.receive()
    reception.close()


@pytest.mark.parametrize(
    ("key", "says"),
    [("short", "got 5 characters"), ("a b" * 10, "no spaces"), ("é" * 30, "ASCII")],
)
def test_what_could_be_guessed_is_no_key(key, says, tmp_path):
    with pytest.raises(ValueError, match=says) as raised:
        _key.find_key({"TW_KEY": key})
    assert key not in str(raised.value)
    assert _key.find_key({}) == "" == _key.find_key({"TW_KEY": ""})


def test_a_key_file_is_its_owners_alone(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"chmod 600 .* mode 640") as raised:
        _key.read_key_file(path)
    assert KEY not in str(raised.value)
    path.chmod(0o600)
    assert _key.read_key_file(path) == KEY
    path.write_text("short")
    with pytest.raises(ValueError, match="got 5 characters"):
        _key.read_key_file(path)


def test_runs_that_share_a_key_have_different_ones():
    keys = {_key.derive_key(KEY, run) for run in ("a", "b")}
    assert len(keys) == 2 and KEY not in keys
    assert _key.draw_key() != _key.draw_key()

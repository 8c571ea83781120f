"""MPI's table: workers make themselves a world by it, and strangers do not."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_launch._launcher.pmi import PmiTable

PUT = b"cmd=put kvsname=k key=P0 value=address\n"


@pytest.fixture
def table():
    table = PmiTable(2)
    yield table
    table.close()


class Client:
    """What MPICH's client says."""

    def __init__(self, table, *, pmiid=""):
        self.sent = b""
        variables = [table.variables(rank) for rank in range(2)]
        host, port = variables[0]["PMI_PORT"].split(":")
        self.socket = socket.create_connection((host, int(port)), 10)
        self.lines = self.socket.makefile("rb")
        if pmiid != "":
            self.say(f"cmd=initack pmiid={pmiid}\n".encode())

    def say(self, line):
        self.sent += line
        self.socket.sendall(line)
        return self

    def ask(self, line):
        return self.say(line).hear()

    def hear(self):
        return dict(
            word.split("=", 1) for word in self.lines.readline().decode().split()
        )

    def close(self):
        self.lines.close()
        self.socket.close()


def join(table, rank):
    client = Client(table, pmiid=table.variables(rank)["PMI_ID"])
    told = [client.hear() for _ in range(4)]
    assert told == [
        {"cmd": "initack", "rc": "0"},
        {"cmd": "set", "size": "2"},
        {"cmd": "set", "rank": str(rank)},
        {"cmd": "set", "debug": "0"},
    ]
    return client


def get(client, key="P0"):
    told = client.ask(f"cmd=get kvsname=k key={key}\n".encode())
    return told["value"] if told["rc"] == "0" else None


def make_world(table):
    """Does what two workers do; returns them."""
    zero, one = join(table, 0), join(table, 1)
    assert zero.ask(PUT)["rc"] == "0"
    assert get(one) == "address"
    zero.say(b"cmd=barrier_in\n")
    assert (
        one.ask(b"cmd=barrier_in\n") == zero.hear() == {"cmd": "barrier_out", "rc": "0"}
    )
    return zero, one


def test_workers_exchange_addresses_and_wait_for_each_other(table):
    zero, one = make_world(table)
    assert get(zero, "PMI_process_mapping") == "(vector,(0,1,2))"
    assert get(zero, "P9") is None
    for client in (zero, one):
        assert client.ask(b"cmd=finalize\n")["cmd"] == "finalize_ack"


@pytest.mark.parametrize(
    ("given", "devices", "wanted"),
    [
        (None, ["lo", "eth0"], "lo"),
        ("eth0", ["lo", "eth0"], None),
        (None, ["lo0"], None),
    ],
)
def test_workers_use_loopback_unless_another_network_is_given(
    table, monkeypatch, given, devices, wanted
):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", given)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(devices)))
    assert table.variables(0).get("UCX_NET_DEVICES") == wanted


def test_a_stranger_neither_reads_nor_writes_nor_arrives(table, capsys):
    stranger = Client(table)
    for line in (
        b"cmd=barrier_in\n",
        PUT,
        b"cmd=get key=P0\n",
        b"cmd=get_my_kvsname\n",
    ):
        assert stranger.ask(line)["cmd"] == "refused"
    for wrong in (0, 1, -1, 1 << 40, "x"):
        assert Client(table, pmiid=wrong).hear()["cmd"] == "refused"
    zero = join(table, 0)
    assert get(zero) is None
    zero.say(b"cmd=barrier_in\n")
    stranger.ask(b"cmd=barrier_in\n")
    zero.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        zero.socket.recv(1)
    assert capsys.readouterr().err.count("[tw-launch] MPI's table refused: ") <= 6


def test_a_recorded_run_gets_nothing_of_the_next(table):
    recorded = [client.sent for client in make_world(table)]
    other = PmiTable(2)
    try:
        for sent in recorded:
            stranger = Client(other).say(sent)
            answers = stranger.socket.makefile("rb").read()
            assert set(answers.splitlines()) == {
                b"cmd=refused rc=1 msg=tw_launch_does_not_know_this_process"
            }
        make_world(other)
    finally:
        other.close()


def test_a_rank_puts_no_other_ranks_keys(table):
    zero, one = make_world(table)
    assert one.ask(PUT.replace(b"address", b"mine"))["rc"] == "1"
    assert one.ask(b"cmd=put key=PMI_process_mapping value=x\n")["rc"] == "1"
    assert get(one) == "address"
    assert zero.ask(PUT.replace(b"address", b"new"))["rc"] == "0"
    assert get(one) == "new"


def test_a_ranks_keys_are_few_and_short(table):
    zero = join(table, 0)
    assert zero.ask(b"cmd=put key=k value=" + b"v" * 1025 + b"\n")["rc"] == "1"
    assert zero.ask(b"cmd=put key=" + b"k" * 65 + b" value=v\n")["rc"] == "1"
    put = [zero.ask(b"cmd=put key=k%d value=v\n" % n)["rc"] for n in range(257)]
    assert put == ["0"] * 256 + ["1"]
    zero.say(b"v" * 5000 + b"\n")
    assert zero.lines.read() == b""


def test_a_worker_is_one_process_at_a_time(table):
    zero, one = make_world(table)
    second = Client(table, pmiid=table.variables(0)["PMI_ID"])
    assert second.hear()["cmd"] == "refused"
    zero.say(b"cmd=barrier_in\n")
    for client in (zero, one):
        client.close()
    make_world(table)  # Of the next program in a script.


@pytest.fixture(scope="module")
def mutants():
    table = PmiTable(2)
    yield table
    table.close()


@given(st.binary(max_size=200))
def test_no_bytes_end_the_table(mutants, noise):
    stranger = Client(mutants).say(noise)
    stranger.socket.shutdown(socket.SHUT_WR)
    assert b"rc=0" not in stranger.lines.read()
    stranger.close()
    zero, one = make_world(mutants)
    with zero.socket, one.socket:
        one.say(noise)  # Ends it at worst.

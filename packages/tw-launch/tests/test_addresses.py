"""Addresses of processes, and where this machine listens."""

import errno
import socket
import threading

import pytest

import tw_launch
from tw_launch import _servers
from tw_launch._addresses import (
    hold_port,
    join_address,
    listen,
    may_pass,
    split_address,
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a:1", ("a", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:22", ("::1", 22)),
        ("[fe80::1%eth0]:22", ("fe80::1%eth0", 22)),
    ],
)
def test_an_address_is_split_and_joined(text, parts):
    assert split_address(text) == parts
    assert join_address(*parts) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", ":1", "[]:1", "::1:22", "a:0", "a:65536", "a:-1", "a:x"),
        *("[::1:1", "[a:1"),
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match=r"has no port|is not host:port"):
        split_address(text)


def lingering_port():
    """Returns a port that a connection still holds whose server closed it first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))
    return port


@pytest.mark.parametrize(
    "open_port", [hold_port, lambda port: listen("127.0.0.1", port)]
)
def test_a_port_is_free_as_soon_as_nothing_listens_there(open_port):
    port = lingering_port()
    with open_port(port) as taken:
        assert taken.getsockname()[1] == port
    with socket.create_server(("", port)), pytest.raises(OSError) as raised:
        open_port(port)
    assert may_pass(raised.value)


def test_a_port_that_is_held_is_found_by_nobody_else():
    with (
        hold_port(0) as held,
        socket.socket() as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("", held.getsockname()[1]))


def test_a_host_elsewhere_is_refused_unless_told_where_to_listen(monkeypatch):
    with pytest.raises(OSError, match=r"192\.0\.2\.1 is not an address") as raised:
        listen("192.0.2.1", 0)
    assert raised.value.errno == errno.EADDRNOTAVAIL
    assert not may_pass(raised.value)
    monkeypatch.setenv("TW_LISTEN", "127.0.0.1")
    with listen("192.0.2.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_name_that_is_not_known_may_be_later():
    with pytest.raises(OSError) as raised:
        listen("rank-0.invalid", 1)
    assert may_pass(raised.value)


@pytest.mark.filterwarnings("ignore::tw_launch.ExposedServerWarning")
def test_a_server_waits_for_its_port_and_then_names_it(monkeypatch):
    monkeypatch.setattr(_servers, "_PORT_S", 0.3)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        addresses = {"ps": (f"[::1]:{port}",), "worker": ("localhost:1",)}
        task = tw_launch.TaskConfig(addresses, "ps", 0)
        with pytest.raises(OSError, match=rf"ps 0 cannot listen at \[::1\]:{port} "):
            tw_launch.start_server(task)
        monkeypatch.setattr(_servers, "_PORT_S", 20.0)
        threading.Timer(0.5, other.close).start()
        server = tw_launch.start_server(task)
    assert server.target == f"grpc://[::1]:{port}"

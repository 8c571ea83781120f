"""Addresses: "host:port" strings, and the ports on which this machine listens.

``TW_LISTEN`` makes a process listen at an address other than the one by which other
machines reach it, which a container or a machine behind NAT does not have itself.
"""

import contextlib
import errno
import os
import re
import socket
import time
from collections.abc import Callable

_AGAIN_S = 0.1


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port"; an IPv6 host must be in brackets, which are removed."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_bare = bare == host and ":" not in host
    if not bare or not (is_bare or host == f"[{bare}]"):
        raise ValueError(f"{address!r} is not host:port or [IPv6 host]:port")
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} has no port from 1 to 65535")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """Joins host and port; the inverse of ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Listens at an address of this machine; TW_LISTEN overrides ``host``."""
    told = os.environ.get("TW_LISTEN", "") or host
    fault: OSError | None = None
    places = socket.getaddrinfo(told, port, type=socket.SOCK_STREAM)
    for family, _, _, _, place in places:
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.socket(family))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(place)
                listener.listen(512)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
                fault = error
            else:
                stack.pop_all()
                return listener
    if fault is not None and fault.errno == errno.EADDRNOTAVAIL:
        elsewhere = " and ".join(dict.fromkeys(str(place[4][0]) for place in places))
        raise OSError(
            fault.errno,
            f"{elsewhere} is not an address of this machine; correct the host, or, if "
            "others reach this machine by an address that it does not have itself, set "
            "TW_LISTEN to the one to listen at (0.0.0.0 for all), and protect the port "
            "by a firewall or a network policy",
        )
    raise fault or OSError(errno.EADDRNOTAVAIL, f"{told} has no address")


def is_loopback(host: str) -> bool:
    """Returns whether a host's text alone makes it a loopback name or address."""
    name = host.lower().rstrip(".")
    is_name = name in ("localhost", "localhost.localdomain", "ip6-localhost")
    return is_name or name == "::1" or re.fullmatch(r"127(\.\d+){3}", name) is not None


def find_unreachable(host: str, listener: socket.socket, who: str) -> str:
    """Explains why other machines cannot connect to ``who`` at ``host``, or returns "".

    Some systems resolve a machine's own name to a loopback address.
    """
    own = str(listener.getsockname()[0])
    if not is_loopback(own):
        return ""
    return (
        f"{host} resolves to {own} here, where other machines cannot reach {who}; "
        "correct /etc/hosts, or set TW_LISTEN to an address of this machine (0.0.0.0 "
        "for all)"
    )


def hold_port(port: int) -> socket.socket:
    """Holds a port against other processes until a server of this one takes it.

    Connections of an ended process, which linger for a minute, do not prevent it.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", port))
    except OSError:
        held.close()
        raise
    return held


def wait_for_port(
    open_port: Callable[[], socket.socket],
    *,
    until_s: float,
    tell: Callable[[OSError], None] = lambda error: None,
) -> socket.socket:
    """Opens a port, retrying until ``until_s``; ``tell`` gets the first error."""
    has_told = False
    while True:
        try:
            return open_port()
        except OSError as error:
            if not may_pass(error) or time.monotonic() >= until_s:
                raise
            if not has_told:
                tell(error)
                has_told = True
        time.sleep(_AGAIN_S)


def may_pass(error: OSError) -> bool:
    """Returns whether to retry: a process may end, or a name become resolvable."""
    return isinstance(error, socket.gaierror) or error.errno == errno.EADDRINUSE

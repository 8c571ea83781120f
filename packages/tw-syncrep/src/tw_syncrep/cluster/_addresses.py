"""Addresses: "host:port" texts, and ports of this machine at which to listen.

``TW_LISTEN`` has a process listen elsewhere than at the address by which others reach
it, which a container or a machine behind a translated address does not have itself.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable

_AGAIN_S = 0.1


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port"; an IPv6 host is in brackets, and returned without them.

    Raises:
      ValueError: it is not one.
    """
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_bare = bare == host and ":" not in host
    if not bare or not (is_bare or host == f"[{bare}]"):
        raise ValueError(f"{address!r} is no host:port or [IPv6 host]:port")
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{address!r} has no port of 1 to 65535")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """Undoes ``split_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Listens at an address of this machine, or where TW_LISTEN says.

    Raises:
      OSError: the port is taken or the host is unknown (``may_pass``), or the host is
        elsewhere.
    """
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
            f"{elsewhere} is no address of this machine; correct the host, or, where "
            "others reach this machine by an address that it does not have itself, set "
            "TW_LISTEN to one at which to listen (0.0.0.0 is all), and keep the port "
            "closed to others by a firewall or a network policy",
        )
    raise fault or OSError(errno.EADDRNOTAVAIL, f"{told} has no address")


def hold_port(port: int) -> socket.socket:
    """Keeps a port from other processes until a server of this one takes it.

    Not from connections of a process that has ended, which linger for a minute.

    Raises:
      OSError: something listens there.
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
    """Opens a port, or waits for it; ``tell`` is called with the first fault.

    Raises:
      OSError: it cannot be opened, or not until then.
    """
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
    """Whether to try again: another process may end, or a name become known."""
    return isinstance(error, socket.gaierror) or error.errno == errno.EADDRINUSE

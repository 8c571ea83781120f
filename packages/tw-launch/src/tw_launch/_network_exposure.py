"""Ports of servers on this machine, and whether other machines can reach them.

A TensorFlow server listens on all interfaces, whatever host it is given, and runs any
graph that anyone sends it: no authentication, no encryption.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import socket
import struct
import warnings
from pathlib import Path

from tw_core.internal import check_whole_number

_LISTEN = "0A"
_LOWEST_PORT = 10_000
_USUAL_EPHEMERAL = 32_768
_TRIES = 1_000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_REQUEST = "16sh14x"
_OPEN = (
    "A TensorFlow server listens on all network interfaces, whatever host it was "
    "given, and runs any graph that anyone sends, without authentication. Keep the "
    "ports closed to others by a firewall or a network policy, or run all tasks on "
    "this machine with `tw-launch --isolate`."
)


class ExposedServerWarning(UserWarning):
    """Other machines can reach a server, or the system does not show if they can."""


def is_exposed(port: int, *, proc: Path = Path("/proc/net")) -> bool:
    """Returns whether other machines can reach a listener on ``port``.

    Args:
      port: TCP port.
      proc: directory of the kernel's tables.

    Returns:
      Whether they can; False on a machine (or in a network namespace) where only the
      loopback interface is up. If the tables cannot be read, False with an
      ``ExposedServerWarning`` that gives the reason.

    Raises:
      TypeError: ``port`` is not a whole number, or ``proc`` not a path.
      ValueError: ``port`` is not 1 to 65535.
    """
    check_whole_number(port=port)
    if not 0 < port < 65536:
        raise ValueError(f"is_exposed: port must be 1 to 65535; got {port}.")
    if not isinstance(proc, Path):
        raise TypeError(f"is_exposed: proc must be a pathlib.Path; got {proc!r}.")
    try:
        return _find_exposure(port, proc)
    except OSError as error:
        warnings.warn(_unknown(error), ExposedServerWarning, stacklevel=2)
        return False


def warn_if_exposed(
    port: int | None, *, stacklevel: int = 1, proc: Path = Path("/proc/net")
) -> None:
    """Warns that a server is or may be open to other machines.

    ``port`` is None for one that TensorFlow will start, on all interfaces. The warning
    points at the caller, or as many frames above as ``stacklevel`` says.
    """
    try:
        warning = _OPEN if _find_exposure(port, proc) else None
    except OSError as error:
        warning = _unknown(error)
    if warning:
        warnings.warn(warning, ExposedServerWarning, stacklevel=stacklevel + 1)


def hold_free_ports(count: int) -> dict[int, socket.socket]:
    """Binds distinct ports that are free; returns the sockets by port.

    While a socket is open, no other process is given its port, by this function or
    by a plain ``bind``. A server that sets ``SO_REUSEADDR``, as TensorFlow's and
    Python's do, can listen there, as the socket itself does not.

    The ports are below the ephemeral range, so that no outgoing connection takes the
    port of a server while it restarts.
    """
    candidates = range(_LOWEST_PORT, _first_ephemeral())
    # Processes of one seed draw different ports, and a program's own draws stay equal.
    tries = random.SystemRandom().sample(candidates, min(_TRIES, len(candidates)))
    with contextlib.ExitStack() as stack:
        held: dict[int, socket.socket] = {}
        for port in tries:
            if len(held) == count:
                break
            with contextlib.suppress(OSError):
                held[port] = stack.enter_context(_hold(port))
        if len(held) < count:
            raise RuntimeError(
                f"hold_free_ports: found {len(held)} of {count} free ports between "
                f"{candidates.start} and {candidates.stop}; end some servers."
            )
        stack.pop_all()
    return held


def _hold(port: int) -> socket.socket:
    """Binds a port of all interfaces, of IPv6 too, on which nothing is bound."""
    dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", port))
        # Only now: set before, it would share the port with others that hold it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held


def isolate() -> None:
    """Moves this process into a network namespace with only a loopback interface.

    Other machines then cannot reach its servers or its children's. It makes the system
    calls through libc, as Python has them only from 3.12 on.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"isolate: the system does not allow a network namespace "
            f"({os.strerror(number)}); run without --isolate behind a firewall",
        )
    # The same user as outside; groups can be mapped once setgroups is denied.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _bring_up("lo")


def _bring_up(interface: str) -> None:
    with socket.socket() as control:
        flags = _flags_of(interface, control)
        request = struct.pack(_REQUEST, interface.encode(), flags | _IFF_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)


def _flags_of(interface: str, control: socket.socket) -> int:
    request = struct.pack(_REQUEST, interface.encode(), 0)
    _, flags = struct.unpack(_REQUEST, fcntl.ioctl(control, _SIOCGIFFLAGS, request))
    return int(flags)


def _find_exposure(port: int | None, proc: Path) -> bool:
    """Works as ``is_exposed`` does; raises OSError if the tables cannot be read."""
    if not any(_leads_outside(name) for _, name in socket.if_nameindex()):
        return False
    if port is None:
        return True
    addresses = _listening_addresses(proc / "tcp", port)
    # A system without IPv6 has no such table.
    with contextlib.suppress(FileNotFoundError):
        addresses += _listening_addresses(proc / "tcp6", port)
    return not all(map(_is_loopback, addresses))


def _leads_outside(interface: str) -> bool:
    """Whether others can reach an interface: a tunnel that is down leads nowhere."""
    if interface == "lo":
        return False
    try:
        with socket.socket() as control:
            return bool(_flags_of(interface, control) & _IFF_UP)
    except OSError:  # the system does not tell
        return True


def _unknown(error: OSError) -> str:
    return (
        f"Whether other machines can reach a server is unknown here: {error}. {_OPEN}"
    )


def _first_ephemeral() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        first = int(text.split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL
    return first if first > _LOWEST_PORT + _TRIES else _USUAL_EPHEMERAL


def _listening_addresses(table: Path, port: int) -> list[str]:
    """Reads the hexadecimal addresses that listen on ``port`` from a kernel table."""
    lines = table.read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    local = [row[1].split(":") for row in rows if len(row) > 3 and row[3] == _LISTEN]
    return [address for address, number in local if int(number, 16) == port]


def _is_loopback(address: str) -> bool:
    """Tests an address as the kernel prints it: words in the host's byte order."""
    if len(address) == 8:
        return address.endswith("7F")
    mapped = address.startswith("0000000000000000FFFF0000") and address.endswith("7F")
    return mapped or address == "0" * 24 + "01000000"

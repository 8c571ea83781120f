"""Connections between ranks: how often they retry, and their state.

TCP doubles the time between its retries: when the network is back after an outage, it
may stay silent for as long again. On Linux 6.15 and newer ``TCP_RTO_MAX_MS`` bounds
that time. gRPC's servers close a connection on which nothing was acknowledged for 20 s
(``TCP_USER_TIMEOUT``), and calls on it fail for good. TensorFlow has no setting for
either, so they are set on the sockets themselves.
"""

import contextlib
import os
import resource
import socket
import stat
import struct
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tw_launch.internal import split_address

RETRY_S = 1.0
"""The smallest value that Linux accepts for ``TCP_RTO_MAX_MS``."""

PROBE_S = 1.0
_USER_TIMEOUT, _RTO_MAX_MS = 18, 44  # linux/tcp.h; Python lacks the second.
_MOST_MS = (1 << 31) - 1
_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received in ``struct tcp_info``.
_MOST_AT_ONCE = 32
_OTHER_FILES = 256
_IDLE_BYTES_PER_S = 1024.0


@dataclass(frozen=True)
class Link:
    """The state of a rank's connection to another rank's TensorFlow server."""

    fault: str = ""  # Why it cannot connect.
    bytes_per_s: float = 0.0  # Received over it while it was watched.

    @property
    def is_used(self) -> bool:
        """Whether data arrives over it."""
        return self.bytes_per_s >= _IDLE_BYTES_PER_S


def allow_connections(size: int) -> int:
    """Raises the soft limit of open files to what ``size`` ranks need, if it may.

    That is a connection of the side channel from each to rank 0, and two of TensorFlow.
    Returns the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (one if one >= 0 else sys.maxsize for one in (soft, hard))  # -1: none
    wanted = min(most, 3 * size + _OTHER_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def retry_often(connection: socket.socket, give_up_s: float) -> None:
    """Bounds the time between retries, which go on for ``give_up_s``."""
    if sys.platform != "linux":
        return
    # A bound on the time between retries also shortens how long they go on.
    give_up_ms = min(_MOST_MS, int(1000 * give_up_s))
    for option, value in (
        (_USER_TIMEOUT, give_up_ms),
        (_RTO_MAX_MS, int(1000 * RETRY_S)),
    ):
        with contextlib.suppress(OSError):  # Older kernels do not know the second.
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def hold_connections(addresses: Collection[str], give_up_s: float) -> None:
    """Makes this process's connections between TensorFlow's servers retry often."""
    ports = {split_address(address)[1] for address in addresses}
    for found in _find_connections():
        with contextlib.suppress(OSError):
            if ports & {found.getsockname()[1], found.getpeername()[1]}:
                retry_often(found, give_up_s)


def probe(addresses: Mapping[int, str]) -> dict[int, Link]:
    """Returns the state of this rank's connections to other ranks' servers.

    Takes about a second.
    """
    if not addresses:
        return {}
    began_s, before = time.monotonic(), _count_received()
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(addresses))) as pool:
        found = dict(zip(addresses, pool.map(_try, addresses.values()), strict=True))
    time.sleep(max(0.0, began_s + PROBE_S - time.monotonic()))
    after, took_s = _count_received(), time.monotonic() - began_s
    links = {}
    for rank, (fault, peer) in found.items():
        received = after.get(peer, 0) - before.get(peer, 0)
        links[rank] = Link(fault, max(0, received) / took_s)
    return links


def _try(address: str) -> tuple[str, tuple[str, int]]:
    """Connects; returns why it cannot, "" if it can, and the peer's address."""
    try:
        with socket.create_connection(split_address(address), PROBE_S) as connection:
            return "", _read_peer(connection)
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__, ("", 0)


def _count_received() -> dict[tuple[str, int], int]:
    """Returns how many bytes have arrived from each peer, on Linux."""
    counts: dict[tuple[str, int], int] = {}
    for found in _find_connections():
        with contextlib.suppress(OSError, struct.error):
            peer = _read_peer(found)
            told = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
            counts[peer] = counts.get(peer, 0) + _RECEIVED.unpack(told)[0]
    return counts


def _read_peer(connection: socket.socket) -> tuple[str, int]:
    """Returns a peer's address; IPv4 may be written as IPv6."""
    host, port = connection.getpeername()[:2]
    return host.removeprefix("::ffff:"), port


def _find_connections() -> Iterator[socket.socket]:
    """Yields this process's TCP connections, TensorFlow's too; do not close them."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # Other systems have no such folder.
        names = os.listdir("/proc/self/fd")
    for name in names:
        with contextlib.suppress(OSError):
            number = int(name)
            is_socket = stat.S_ISSOCK(os.fstat(number).st_mode)
            # gRPC's never block. Python could change the mode of others on taking them.
            if not is_socket or os.get_blocking(number):
                continue
            # Not a duplicate, which would keep a closed connection alive.
            found = socket.socket(fileno=number)
            try:
                is_ip = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_ip and found.type == socket.SOCK_STREAM:
                    yield found
            finally:
                found.detach()

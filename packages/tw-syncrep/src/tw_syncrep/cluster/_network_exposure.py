"""Says where a server can be reached from, which is wider than it was told.

A TensorFlow server listens on all interfaces whatever host it is given, and runs
whatever graph anyone sends it: no authentication, no encryption.
"""

import socket
import warnings
from pathlib import Path

from tw_core.checks import check_whole_number

_LISTEN = "0A"


class ExposedServerWarning(UserWarning):
    """A server can be reached from other machines."""


def is_exposed(port: int, *, proc: Path = Path("/proc/net")) -> bool:
    """Tells whether something listens on ``port`` for other machines.

    Args:
      port: TCP port.
      proc: where the kernel's tables are.

    Returns:
      Whether it does, as far as the system tells; False on a machine (or in a
      network namespace) that has the loopback interface only.

    Raises:
      TypeError: ``port`` is no whole number, or ``proc`` no path.
      ValueError: ``port`` is none that there can be.
    """
    check_whole_number("is_exposed", port=port)
    if not 0 < port < 65536:
        raise ValueError(f"is_exposed: port must be 1 to 65535; got {port}.")
    if not isinstance(proc, Path):
        raise TypeError(f"is_exposed: proc must be a pathlib.Path; got {proc!r}.")
    if [name for _, name in socket.if_nameindex()] == ["lo"]:
        return False
    return any(
        not _is_loopback(address)
        for table in ("tcp", "tcp6")
        for address in _listening_addresses(proc / table, port)
    )


def warn_if_exposed(port: int) -> None:
    """Warns, once in a process, that a server is open to other machines."""
    if is_exposed(port):
        warnings.warn(
            "A TensorFlow server listens on all network interfaces, whatever host it "
            "was given, and runs any graph that anyone sends, without authentication. "
            "Keep the ports closed to others by a firewall or a network policy, or "
            "run all tasks on this machine with `tw-launch --isolate`.",
            ExposedServerWarning,
            stacklevel=2,
        )


def _listening_addresses(table: Path, port: int) -> list[str]:
    """Reads the hexadecimal local addresses of a kernel table."""
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    local = [row[1].split(":") for row in rows if len(row) > 3 and row[3] == _LISTEN]
    return [address for address, number in local if int(number, 16) == port]


def _is_loopback(address: str) -> bool:
    """Reads an address as the kernel prints it: words in the host's byte order."""
    if len(address) == 8:
        return address.endswith("7F")
    mapped = address.startswith("0000000000000000FFFF0000") and address.endswith("7F")
    return mapped or address == "0" * 24 + "01000000"

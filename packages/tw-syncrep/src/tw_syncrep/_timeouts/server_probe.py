"""Asks a task's server whether it answers, without TensorFlow.

A dead server refuses the connection. A stopped one does not: the kernel takes
the connection in its stead. So the probe sends the greeting of HTTP/2, which
gRPC speaks, and waits for the first bytes of the answer.
"""

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

_GREETING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
)
PROBE_S = 0.4
"""Seconds after which a server that says nothing counts as silent."""


def find_fault(address: str, *, timeout_s: float = PROBE_S) -> str | None:
    """Tells what is wrong with the server at ``address`` ("host:port").

    Returns:
      None where it answers, else a few words.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as peer:
            peer.settimeout(timeout_s)
            peer.sendall(_GREETING)
            return None if peer.recv(1) else "closes connections"
    except TimeoutError:
        return f"does not answer within {timeout_s:g} s"
    except OSError as error:
        return f"cannot be reached ({error.strerror or error})"


def find_faults(addresses: Mapping[str, str]) -> dict[str, str]:
    """Asks several servers at the same time.

    Args:
      addresses: "host:port" by the task's name.

    Returns:
      "name (address) fault" by name, for those that do not answer.
    """
    if not addresses:
        return {}
    with ThreadPoolExecutor(min(len(addresses), 16)) as pool:
        faults = list(pool.map(find_fault, addresses.values()))
    return {
        name: f"{name} ({address}) {fault}"
        for (name, address), fault in zip(addresses.items(), faults, strict=True)
        if fault
    }

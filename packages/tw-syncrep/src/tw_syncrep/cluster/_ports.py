"""Free ports for servers on this machine.

They lie below the range that the system gives to outgoing connections, so that
no connection takes the port of a server while it restarts.
"""

import contextlib
import random
import socket
from pathlib import Path

_LOWEST = 10_000
_USUAL_EPHEMERAL = 32_768
_TRIES = 1_000


def find_free_ports(count: int) -> list[int]:
    """Finds ports on which nothing listens, all different.

    Raises:
      RuntimeError: there are not as many.
    """
    ports: list[int] = []
    candidates = range(_LOWEST, _first_ephemeral())
    with contextlib.ExitStack() as held:
        for port in random.sample(candidates, min(_TRIES, len(candidates))):
            if len(ports) == count:
                break
            trial = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                trial.bind(("", port))
                ports.append(port)
    if len(ports) < count:
        raise RuntimeError(
            f"find_free_ports: found {len(ports)} of {count} free ports between "
            f"{candidates.start} and {candidates.stop}; end what listens there."
        )
    return ports


def _first_ephemeral() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        first = int(text.split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL
    return first if first > _LOWEST + _TRIES else _USUAL_EPHEMERAL

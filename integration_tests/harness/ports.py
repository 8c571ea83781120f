"""Ports for servers that tests start."""

from collections import deque
from socket import socket

from tw_launch._network_exposure import hold_free_ports

_KEPT = 100  # more than the tests draw that run at a time

_held: deque[socket] = deque()


def find_free_ports(count: int) -> list[int]:
    """Draws ports that no other process of this machine draws for a while.

    Minutes can pass before the server listens, and tests run in several processes.
    """
    drawn = hold_free_ports(count)
    _held.extend(drawn.values())
    while len(_held) > max(_KEPT, count):
        _held.popleft().close()
    return list(drawn)

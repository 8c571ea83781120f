"""The side channel: a connection of every rank to rank 0, for all but tensors.

    rank 0                                       every rank, rank 0 too
    ------                                       ----------------------
    listens                       <- hello ---   connects, says who it is
    waits until all have come     -- welcome ->  knows all addresses
    compares, gives a number      <- agree ---   describes a collective, waits
    (Exchange)                    -- agreed -->  goes on, or raises
    hands a description on        -- followed -> does as others, whose step it lacks
    notes who is where            <- beat ----   a few times a second
    (Attendance)                  -- beat ---->  knows that rank 0 answers
    is in doubt about some        -- report -->  says at once how far it is
    finds who is missing          -- missing ->  ends what it waits in, raises

TensorFlow's collectives end with errors that name no rank, or do not end. What they
wait for is known here, whatever state they are in, as nothing here goes through
TensorFlow. Messages are JSON objects, one per line.
"""

import json
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 1 << 26
"""A line that is longer is refused: what comes is not one of our messages."""


def find_interval_s(timeout_s: float) -> float:
    """Returns how often ranks are heard, in seconds."""
    return min(0.25, max(0.02, timeout_s / 8))


@dataclass(frozen=True)
class Introduction:
    """What a rank says of itself when it comes.

    Attributes:
      rank: its number.
      size: how many ranks it expects.
      address: "host:port" of its TensorFlow server.
      task: "host:port, process 123", for messages.
      machine: what ranks of one machine have in common.
      versions: of what must be the same everywhere.
    """

    rank: int
    size: int
    address: str
    task: str
    machine: str
    versions: Mapping[str, str]


class LineSocket:
    """A connected socket; several threads may send, one may receive."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes over the connection."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.connection = connection
        self._received = b""
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For ``selectors``."""
        return self.connection.fileno()

    def send(self, message: dict[str, Any], *, timeout_s: float) -> None:
        """Sends an object.

        Raises:
          OSError: the connection is lost, or takes nothing for ``timeout_s``.
        """
        data = memoryview(json.dumps(message).encode() + b"\n")
        end_s = time.monotonic() + timeout_s
        ready = select.poll()
        ready.register(self.connection, select.POLLOUT)
        with self._sending:
            while data:
                wait_s = max(0.0, end_s - time.monotonic())
                if not ready.poll(1000 * wait_s):
                    raise TimeoutError(f"LineSocket: took nothing for {timeout_s} s.")
                data = data[self.connection.send(data) :]

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns what has arrived; None at the connection's end. Call when readable.

        Raises:
          OSError: the connection is lost.
          ValueError: it is no JSON object, or too long.
        """
        try:
            data = self.connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > MAX_BYTES:
            raise ValueError(f"LineSocket: a line of over {MAX_BYTES} bytes.")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("LineSocket: a line that is no JSON object.")
        return messages

    def close(self) -> None:
        """Closes the connection; harmless when repeated."""
        self.connection.close()

"""A connection to the launcher of another machine.

Each side sends a beat five times within the silence that the other puts up with, so one
that was stopped, or whose network is gone, is noticed like one that has ended.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tw_syncrep.launch._messages import MAX_BYTES, Beat, Message, decode, encode

_BEATS = 5
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Lost:
    """The other launcher is gone.

    Attributes:
      why: as a sentence goes on, "its launcher ...".
    """

    why: str


class Link:
    """A connection; messages can be sent from any thread.

    Attributes:
      host: numeric address of the other end.
    """

    def __init__(self, connection: socket.socket, *, silence_s: float) -> None:
        """Takes the connection over; ``silence_s`` ends the reading."""
        self.host: str = connection.getpeername()[0]
        self._connection = connection
        self._silence_s = silence_s
        self._received = bytearray()
        self._sending = threading.Lock()
        self._closed = threading.Event()
        connection.settimeout(silence_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def own_host(self) -> str:
        """Numeric address of this end."""
        return str(self._connection.getsockname()[0])

    def send(self, message: Message) -> None:
        """Sends a message; where the other is gone, its reader notices."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(encode(message))

    def receive(self, within_s: float) -> Message:
        """Waits for a message.

        Raises:
          OSError: the connection has ended, or none came in time (TimeoutError).
          ValueError: what came is no message.
        """
        end = time.monotonic() + within_s
        while b"\n" not in self._received:
            if len(self._received) > MAX_BYTES:
                raise ValueError(f"what came is longer than {MAX_BYTES} bytes")
            self._read_more(end)
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return decode(line)

    def _read_more(self, end: float) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError
        chunk = self._connection.recv(_CHUNK)
        if not chunk:
            raise ConnectionError
        self._received += chunk

    def attend(self, hear: Callable[["Link", Message | Lost], None]) -> None:
        """Sends beats from now on, and calls ``hear`` in a thread with all that comes.

        The last that it hears is ``Lost``.
        """
        for work in (lambda: self._read(hear), self._beat):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """Says that no more will be sent; what the other sends still comes."""
        self._closed.set()
        with self._sending, contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        """Ends the connection at once."""
        self._closed.set()
        with self._sending:
            self._connection.close()

    def _read(self, hear: Callable[["Link", Message | Lost], None]) -> None:
        try:
            while True:
                message = self.receive(self._silence_s)
                if not isinstance(message, Beat):
                    hear(self, message)
        except TimeoutError:
            why = f"nothing was heard of its launcher for {self._silence_s:g} s"
        except OSError:
            why = "its launcher has ended or was killed"
            self.drop()
        except ValueError as error:
            why = f"its launcher is not understood: {error}"
        self._closed.set()
        hear(self, Lost(why))

    def _beat(self) -> None:
        while not self._closed.wait(self._silence_s / _BEATS):
            self.send(Beat())

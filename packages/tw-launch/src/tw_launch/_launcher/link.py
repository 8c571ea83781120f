"""A connection to the launcher of another machine.

Each side sends five heartbeats within the silence that the other tolerates, so a
launcher that was stopped or cut off is noticed like one that has ended.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tw_launch._channel import LineSocket
from tw_launch._launcher.messages import MAX_BYTES, Beat, Message, decode, encode

_BEATS = 5


@dataclass(frozen=True)
class Lost:
    """The other launcher is gone."""

    why: str  # continues a sentence: "its launcher ..."


class Link:
    """A connection to another launcher; any thread may send."""

    def __init__(
        self,
        line: LineSocket,
        *,
        silence_s: float,
        received: Sequence[bytes] = (),
        is_known: bool = True,
    ) -> None:
        """Takes ownership of the connection, lost after ``silence_s`` of silence.

        ``received`` has lines that were read already. A peer that ``is_known`` has the
        run's key, or belongs to this user.
        """
        self.own_host = str(line.connection.getsockname()[0])
        self.is_known = is_known
        self._line = line
        line.max_bytes = MAX_BYTES
        self._silence_s = silence_s
        self._received = deque(received)
        self._closed = threading.Event()

    def send(self, message: Message) -> None:
        """Sends a message; a lost connection is left for the reader to notice."""
        with contextlib.suppress(OSError):
            self._line.send_line(encode(message), timeout_s=self._silence_s)

    def refuse(self, message: Message) -> None:
        """Sends a last message, unless that would take time, and closes."""
        with contextlib.suppress(OSError):
            self._line.send_line(encode(message), timeout_s=0.0)
        self.drop()

    def receive(self, within_s: float) -> Message:
        """Waits for a message; OSError if none arrives, ValueError if it is invalid."""
        end = time.monotonic() + within_s
        while not self._received:
            if not self._line.wait(end - time.monotonic()):
                raise TimeoutError
            lines = self._line.receive_lines()
            if lines is None:
                raise ConnectionError
            self._received.extend(lines)
        return decode(self._received.popleft())

    def attend(self, hear: Callable[["Link", Message | Lost], None]) -> None:
        """Sends heartbeats; in a thread, ``hear`` gets all messages, last ``Lost``."""
        for work in (lambda: self._read(hear), self._beat):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """Ends sending; messages from the other launcher still arrive."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._line.end_sending()

    def drop(self) -> None:
        """Closes the connection at once."""
        self._closed.set()
        self._line.close()

    def _read(self, hear: Callable[["Link", Message | Lost], None]) -> None:
        try:
            while True:
                message = self.receive(self._silence_s)
                if not isinstance(message, Beat):
                    hear(self, message)
        except TimeoutError:
            why = f"its launcher has sent nothing for {self._silence_s:g} s"
        except OSError:
            why = "its launcher has ended or was killed"
            self.drop()
        except ValueError as error:
            why = f"its launcher sent an invalid message: {error}"
        self._closed.set()
        hear(self, Lost(why))

    def _beat(self) -> None:
        while not self._closed.wait(self._silence_s / _BEATS):
            self.send(Beat())

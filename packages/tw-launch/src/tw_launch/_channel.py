"""The line channel: one JSON value per line, between ranks and between launchers.

Anyone who can reach a port may send anything (``_reception`` finds out who it is).
A line that is too long, is not JSON or nests too deeply is refused, and each field is
read as its declared type. A refusal is a ``ValueError`` and affects one connection.
"""

import ctypes
import functools
import json
import math
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

MAX_BYTES = 1 << 26
"""Length of the longest line accepted from a known peer."""
_LARGEST = 1 << 63
_MOST_CHARACTERS = 600
_read_hints = functools.cache(get_type_hints)


def parse_line(line: bytes) -> Any:
    """Parses a line as JSON; raises ValueError for anything else, NaN included."""
    try:
        return json.loads(line, parse_constant=_parse_finite, parse_float=_parse_finite)
    except (ValueError, RecursionError):
        raise ValueError(f"expected a message, got {line[:60]!r}") from None


def parse_messages(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parses lines as messages, objects that say what to ``do``."""
    messages = [parse_line(line) for line in lines]
    for line, message in zip(lines, messages, strict=True):
        if not isinstance(message, dict) or type(message.get("do")) is not str:
            raise ValueError(f"expected a message, got {line[:60]!r}")
    return messages


def write_line(message: dict[str, Any]) -> bytes:
    """Writes a message as a line."""
    return json.dumps(message).encode() + b"\n"


def write_printable(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Returns text for a log or a terminal: escaped, and no longer than ``most``."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:most])
    return shown if len(text) <= most else f"{shown}..."


def read_as(hint: Any, value: Any) -> Any:
    """Reads a parsed value as a field's type: a dataclass, tuple, dict or scalar."""
    if type(value) is hint and hint in (str, bool):
        return value  # First, as most fields are; rank 0 reads thousands a second.
    if type(value) is hint is int and -_LARGEST <= value < _LARGEST:
        return value  # A bool is not an int here.
    inner, origin = get_args(hint), get_origin(hint)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        hints = _read_hints(hint)
        if value.keys() == hints.keys():
            return hint(**{name: read_as(hints[name], value[name]) for name in hints})
    elif origin is UnionType:
        return None if value is None else read_as(inner[0], value)
    elif origin is tuple and isinstance(value, list):
        if inner[-1] is Ellipsis:
            return tuple(read_as(inner[0], item) for item in value)
        if len(inner) == len(value):
            return tuple(map(read_as, inner, value))
    elif origin in (dict, Mapping) and isinstance(value, dict):
        return {name: read_as(inner[1], item) for name, item in value.items()}
    elif hint is float and type(value) in (int, float):
        return float(read_as(int, value) if type(value) is int else value)
    wanted, got = getattr(hint, "__name__", hint), type(value).__name__
    if isinstance(value, int | float | str):
        got = repr(value)[:60]
    raise ValueError(f"expected {wanted}, got {got}")


_libc = ctypes.PyDLL(None, use_errno=True)
"""Its calls keep Python's lock, which a socket's own methods give up, though these
sockets never block. Another thread that computes in Python returns it only after 5 ms:
rank 0 read 40 lines a second while it traced a function."""
_libc.recv.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.send.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int
_libc.recv.restype = _libc.send.restype = ctypes.c_ssize_t
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_PART_BYTES = 1 << 16


class LineSocket:
    """A connected socket for lines; several threads may send, one may receive."""

    def __init__(
        self, connection: socket.socket, *, max_bytes: int = MAX_BYTES
    ) -> None:
        """Takes ownership of the connection; ``max_bytes`` bounds received lines."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.connection = connection
        self.max_bytes = max_bytes
        self._received = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """For ``selectors``."""
        return self.connection.fileno()

    def send(self, message: dict[str, Any], *, timeout_s: float) -> None:
        """Sends an object; raises OSError if it is not accepted in time."""
        self.send_line(write_line(message), timeout_s=timeout_s)

    def send_line(self, line: bytes, *, timeout_s: float) -> None:
        """Sends bytes that end in a newline; raises as ``send`` does."""
        end_s = time.monotonic() + timeout_s
        with self._sending:
            if self.fileno() < 0:
                raise OSError("LineSocket: the connection is closed.")
            while line:
                try:  # First, as most lines are short: rank 0 sends thousands a second.
                    sent = _libc.send(self.fileno(), line, len(line), _NO_SIGNAL)
                    line = line[_check(sent) :]
                except (BlockingIOError, InterruptedError):
                    self._wait_to_send(end_s - time.monotonic(), timeout_s)

    def _wait_to_send(self, wait_s: float, timeout_s: float) -> None:
        ready = select.poll()
        ready.register(self.connection, select.POLLOUT)
        if not ready.poll(1000 * max(0.0, wait_s)):
            raise TimeoutError(f"LineSocket: sent nothing for {timeout_s} s.")

    def wait(self, timeout_s: float) -> bool:
        """Waits until something can be received; returns whether it can."""
        ready = select.poll()
        ready.register(self.connection, select.POLLIN)
        return bool(ready.poll(1000 * max(0.0, timeout_s)))

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns the messages received, None at the end; call when readable."""
        lines = self.receive_lines()
        return None if lines is None else parse_messages(lines)

    def receive_lines(self) -> list[bytes] | None:
        """Works as ``receive`` does, but does not parse the lines."""
        try:
            part = ctypes.create_string_buffer(_PART_BYTES)
            size = _check(_libc.recv(self.fileno(), part, _PART_BYTES, 0))
        except (BlockingIOError, InterruptedError):
            return []
        if not size:
            return None
        data = ctypes.string_at(part, size)
        lines: list[bytes] = []
        if b"\n" in data:  # Searches a long line once, not again with each part.
            *lines, rest = bytes(self._received + data).split(b"\n")
            self._received = bytearray(rest)
        else:
            self._received += data
        if max(map(len, (*lines, self._received))) > self.max_bytes:
            raise ValueError(f"a received line is longer than {self.max_bytes} bytes")
        return lines

    def end_sending(self) -> None:
        """Ends sending; lines from the other end still arrive."""
        with self._sending:
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection; may be called twice."""
        self.connection.close()


def _check(count: int) -> int:
    """Returns what a call to ``_libc`` returned; raises OSError where it failed."""
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count


def _parse_finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value

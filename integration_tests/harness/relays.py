"""A relay of TCP connections that stands for the network between two tasks.

A task that is to reach another through a relay has the relay's address in its
``TF_CONFIG``. What a relay cuts is lost for as long as it is cut, without a sign;
what it refuses is reset.
"""

import contextlib
import socket
import struct
import threading
from typing import Any

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Relay:
    """Passes connections to a port of this machine on to another, or does not."""

    def __init__(self, target: int) -> None:
        """Takes the port to connect to."""
        self.target = target
        self._listener = socket.create_server(("localhost", 0))
        self.port = int(self._listener.getsockname()[1])
        self._is_open = threading.Event()
        self._is_open.set()
        self._refuses = self._has_ended = False
        self._ends: list[socket.socket] = []
        self.recorded: dict[socket.socket, bytearray] = {}  # What clients have sent.
        _start(self._accept)

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    def cut(self) -> None:
        """Passes nothing on; connections stay, and new ones are taken."""
        self._is_open.clear()

    def heal(self) -> None:
        """Passes on again what was held, and takes new connections."""
        self._refuses = False
        self._is_open.set()

    def refuse(self) -> None:
        """Resets all connections, and every new one."""
        self._refuses = True
        self._reset()

    def lead_to(self, target: int) -> None:
        """Resets all connections; new ones go to another port."""
        self.target = target
        self._reset()

    def end(self) -> None:
        self._has_ended = True
        self._is_open.set()
        self._reset()
        self._listener.close()

    def _reset(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            _close(end, resets=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._has_ended:
                taken, _ = self._listener.accept()
                if self._refuses:
                    _close(taken, resets=True)
                else:
                    _start(self._serve, taken)

    def _serve(self, taken: socket.socket) -> None:
        self._ends.append(taken)
        self._is_open.wait()
        try:
            onward = socket.create_connection(("localhost", self.target), 5)
        except OSError:
            _close(taken, resets=True)
            return
        onward.settimeout(None)
        self._ends.append(onward)
        self.recorded[taken] = bytearray()
        _start(self._pass_on, taken, onward)
        self._pass_on(onward, taken)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.recorded.get(source, bytearray()).extend(data)
                self._is_open.wait()
                sink.sendall(data)
        _close(sink)
        _close(source)


def _start(work: Any, *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()


def _close(end: socket.socket, *, resets: bool = False) -> None:
    with contextlib.suppress(OSError):
        if resets:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            end.shutdown(socket.SHUT_RDWR)
    if resets:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RD)  # wakes the thread that reads from it
    end.close()

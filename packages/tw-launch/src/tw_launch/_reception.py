"""A port that strangers can reach: who is admitted, and what all others can do.

Until a peer is admitted, it may send lines of 64 KiB, for 10 s, and it is one of 128 at
most, in addition to those that are awaited. Answers that cannot be sent at once are
dropped. Rank 0, node 0 of ``tw-launch`` and MPI's table receive connections by this
class; each then reads the connections that it has admitted in its own way.
"""

import contextlib
import errno
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tw_launch._channel import (
    LineSocket,
    parse_messages,
    read_as,
    write_line,
    write_printable,
)
from tw_launch._key import is_same, sign

STRANGER_BYTES = 1 << 16
"""Length of the longest line accepted from a peer that is not known."""

STRANGER_S = 10.0
"""How long a peer has to become known."""

MOST_STRANGERS = 128
"""More connections than these, and than are awaited, close the oldest.

Its owner may connect again.
"""

_SAID = 5
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)
_NONE_LEFT_S = 0.05
_LISTEN = 10  # include/net/tcp_states.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _ALL_BITS = 4, 20, 0xFFFF_FFFF


class Refusal(Exception):
    """A peer is not admitted: why, for this program's log, and what it is sent."""

    def __init__(self, why: str, answer: bytes | None = None) -> None:
        super().__init__(why)
        self.answer = answer


@dataclass(eq=False)
class Peer:
    """A connection that is not admitted yet."""

    line: LineSocket
    since_s: float = field(default_factory=time.monotonic)
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    has_proved: bool = False
    is_known: bool = False  # Has the key, or belongs to this user: may read why.
    is_noted: bool = False  # In the log, once for a connection.


class Refusals:
    """Announces the first refusals; then every tenth power, with their number."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        """``announce`` gets printable text; any thread may call ``note``."""
        self._announce = announce
        self._count, self._lock = 0, threading.Lock()

    def note(self, why: str) -> None:
        """Counts a refusal, and announces it or not."""
        with self._lock:
            self._count += 1
            count = self._count
        if count <= _SAID:
            more = "; from now on only counted" if count == _SAID else ""
            self._announce(f"{write_printable(why)}{more}")
        elif str(count).strip("0") == "1":
            self._announce(f"{write_printable(why)}; {count} connections so far")


class Reception:
    """Accepts connections, and hands over those whose peers are known."""

    def __init__(
        self,
        listener: socket.socket,
        admit: Callable[[Peer, list[bytes]], bool],
        *,
        door: str,
        key: str | None,
        refusals: Refusals,
        answer: bytes | None = None,
    ) -> None:
        """Takes over a listening socket.

        ``admit`` gets the lines of a peer that has proved to have ``key``, "" if the
        run has none: it takes over the connection and returns True, or returns False to
        get the next lines too, or raises ``Refusal`` or any other error. The peers of a
        door whose ``key`` is None prove nothing before. ``answer`` is sent to others.
        """
        self._listener, self._admit = listener, admit
        self._door, self._key, self._refusals = door, key, refusals
        self._answer = answer or write_line(
            {
                "do": "refused",
                "why": f"{door} has refused this connection; its log says why",
                "again": False,
            }
        )
        # How many more are to be admitted: a thousand that come at once, each of which
        # has to answer, would make each other leave.
        self.num_awaited = 0
        self.full = ""  # Why it can accept no more connections.
        self._strangers: dict[LineSocket, Peer] = {}  # The oldest first.
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """For ``selectors``: readable when ``receive`` has something to do."""
        return self._selector.fileno()

    def receive(self, timeout_s: float = 0.0) -> None:
        """Accepts connections, reads from strangers, and drops those that are late.

        Call it when readable, and a few times a second.
        """
        for ready, _ in self._selector.select(timeout_s):
            if isinstance(ready.fileobj, LineSocket):
                if peer := self._strangers.get(ready.fileobj):
                    self._read(peer)
            else:
                self._accept()
        late_s = time.monotonic() - STRANGER_S
        while self._strangers and self._oldest.since_s <= late_s:
            self._drop(self._oldest)

    @property
    def _oldest(self) -> Peer:
        return next(iter(self._strangers.values()))

    def wake(self) -> None:
        """Accepts nothing more, and ends a ``receive`` in another thread."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all that is not handed over; in a forked child, only its copies."""
        for line in list(self._strangers):
            line.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError as error:
            if error.errno in _NONE_LEFT:
                self.full = str(error.strerror)
                self._refusals.note(
                    f"{self._door} has no file descriptor left for another connection; "
                    "raise the limit (`ulimit -n`)"
                )
                if self._strangers:
                    self._drop(self._oldest)
                else:
                    time.sleep(_NONE_LEFT_S)  # The connection stays pending.
            return
        self.full = ""
        if len(self._strangers) >= MOST_STRANGERS + self.num_awaited:
            self._drop(self._oldest)
        with contextlib.suppress(OSError):
            peer = Peer(LineSocket(connection, max_bytes=STRANGER_BYTES))
            self._strangers[peer.line] = peer
            self._selector.register(peer.line, selectors.EVENT_READ)
            if self._key is not None:
                told = {"door": self._door, "nonce": peer.nonce}
                has_key = {"has_key": bool(self._key)}
                self._send(peer, write_line({"do": "challenge", **told, **has_key}))

    def refuse_lines(self, peer: Peer, why: str, lines: Sequence[bytes]) -> None:
        """Answers each line of a peer that stays a stranger for the rest of its time.

        A client of a protocol of questions and answers may wait for them.
        """
        self._note(peer, why)
        self._send(peer, self._answer * len(lines))

    def _send(self, peer: Peer, line: bytes) -> None:
        """Sends a line if that takes no time; otherwise the connection ends."""
        try:
            peer.line.send_line(line, timeout_s=0.0)
        except OSError:
            self._drop(peer)

    def _read(self, peer: Peer) -> None:
        try:
            lines = peer.line.receive_lines()
            if lines is None:
                self._drop(peer)
            elif lines:
                self._take(peer, lines)
        except Exception as error:  # No peer's message may end anything of others.
            self._refuse(peer, error)

    def _take(self, peer: Peer, lines: list[bytes]) -> None:
        if self._key is not None and not peer.has_proved:
            self._check_proof(peer, lines.pop(0))
        elif not self._key and not peer.is_known:
            self._check_owner(peer)
        if not lines:
            return
        self._selector.unregister(peer.line)
        if not self._admit(peer, lines):
            if peer.line.fileno() >= 0:  # It was not dropped.
                self._selector.register(peer.line, selectors.EVENT_READ)
            return
        self._strangers.pop(peer.line, None)

    def _check_proof(self, peer: Peer, line: bytes) -> None:
        """Reads the answer to the challenge, and answers it."""
        [message] = parse_messages([line])
        if message["do"] != "prove":
            raise Refusal(f"expected a proof that it has the key, got {line[:60]!r}")
        theirs = read_as(str, message.get("nonce"))
        key, nonces = self._key or "", (theirs, peer.nonce)
        wanted = sign(key, "client", self._door, *nonces)
        if "\n" in theirs or not is_same(read_as(str, message.get("proof")), wanted):
            told = f"{self._door} has another key; give all processes of a run the same"
            answer = {"do": "refused", "why": f"{told} TW_KEY", "again": False}
            raise Refusal("it does not have this run's key", write_line(answer))
        if key:
            peer.is_known = True
        else:
            self._check_owner(peer)
        peer.has_proved = True
        proof = sign(key, "server", self._door, *nonces)
        self._send(peer, write_line({"do": "proved", "proof": proof}))

    def _check_owner(self, peer: Peer) -> None:
        """Without a key, other users of this machine are refused, if they can be."""
        owner = find_owner(peer.line.connection)
        if owner is not None and owner != os.geteuid():
            raise Refusal(f"it belongs to user {owner}, and this run has no key")
        peer.is_known = owner is not None

    def _refuse(self, peer: Peer, error: Exception) -> None:
        if isinstance(error, OSError):  # It is gone.
            self._drop(peer)
            return
        self._note(peer, str(error) or type(error).__name__)
        answer = error.answer if isinstance(error, Refusal) else None
        self._send(peer, answer or self._answer)
        self._drop(peer)

    def _note(self, peer: Peer, why: str) -> None:
        if not peer.is_noted:
            peer.is_noted = True
            self._refusals.note(why)

    def _drop(self, peer: Peer) -> None:
        if self._strangers.pop(peer.line, None) is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(peer.line)
            peer.line.close()


def find_owner(connection: socket.socket) -> int | None:
    """Returns the number of the user who owns the other end, if an end is on loopback.

    None if it is elsewhere, or if the system does not tell. Raises ``Refusal`` if no
    process has the other end open any more, so that nobody owns it.
    """
    ours, theirs = connection.getsockname()[:2], connection.getpeername()[:2]
    addresses = [ipaddress.ip_address(host) for host in (ours[0], theirs[0])]
    plain = [getattr(one, "ipv4_mapped", None) or one for one in addresses]
    if not any(one.is_loopback for one in plain):
        return None  # A client may come from another address of this machine.
    ends = [
        (str(host), end[1]) for host, end in zip(plain, (ours, theirs), strict=True)
    ]
    family = socket.AF_INET if plain[1].version == 4 else socket.AF_INET6
    try:
        owner = _ask_kernel(family, ends[1], ends[0])
        if owner is None and _ask_kernel(family, ends[0], ends[1]) is None:
            return None  # It does not know this end either.
    except (OSError, AttributeError):  # It is not Linux, or a sandbox.
        return None
    if owner is None:
        raise Refusal("it has closed its end, so its user is not known")
    return owner


def _ask_kernel(
    family: int, local: tuple[str, int], remote: tuple[str, int]
) -> int | None:
    """Returns the owner of a socket by its addresses; None if no process has it open.

    A request of ``sock_diag(7)``: /proc/net/tcp has it too, but takes milliseconds.
    """
    hosts = [socket.inet_pton(family, host) for host, _ in (local, remote)]
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ALL_BITS)
    request += struct.pack("!HH", local[1], remote[1])
    request += struct.pack("=16s16sIII", *hosts, 0, _ALL_BITS, _ALL_BITS)
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, 1, 1, 0)
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG
    ) as asked:
        asked.settimeout(1.0)
        asked.send(header + request)
        answer = asked.recv(1 << 13)
    if struct.unpack_from("=H", answer, 4)[0] != _SOCK_DIAG_BY_FAMILY:
        return None
    # If nobody has that end, the kernel shows who listens at its port.
    listens = answer[17] == _LISTEN
    owner, inode = struct.unpack_from("=II", answer, 16 + 64)
    return int(owner) if inode and not listens else None

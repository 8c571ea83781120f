"""The machines of a run join at node 0.

Node 0 listens at the coordinator's address. The others connect, send ``Hello``, and
keep the connection; the run begins when all have joined and agree on versions and
options.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from signal import Signals

from tw_launch._addresses import (
    find_unreachable,
    is_loopback,
    join_address,
    listen,
    may_pass,
)
from tw_launch._channel import LineSocket
from tw_launch._key import KeyMismatchError, prove
from tw_launch._launcher.link import Link, Lost
from tw_launch._launcher.messages import (
    SIGNALS,
    Hello,
    Message,
    Over,
    Signalled,
    decode,
    encode,
)
from tw_launch._launcher.output import announce
from tw_launch._reception import STRANGER_BYTES, Peer, Reception, Refusal, Refusals

CANNOT_START = 2
NODE_0 = "node 0"
_CONNECT_S = 2.0
_FAREWELL_S = 2.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_POLL_S = 0.25
_LONGEST_HOST = 255
_REFUSED = "node 0 has refused this machine; its output says why"

# Events of a launcher: a signal, the end of a process, a message or a new machine. Any
# thread puts them in; only the main thread takes them out.
Inbox = SimpleQueue[object]


@dataclass(frozen=True)
class Heard:
    """A message has arrived, or the other end of the link is lost."""

    link: Link
    message: Message | Lost


@dataclass(frozen=True)
class Arrived:
    """A launcher has connected and sent ``Hello``."""

    link: Link
    hello: Hello
    refusals: Refusals

    def turn_away(self, why: str) -> None:
        """Refuses it; only a known one is sent why."""
        name = Node(self.hello).name
        self.refusals.note(f"{name}: {why}")
        said = f"{name} was rejected: {why}"
        self.link.refuse(Over(CANNOT_START, said if self.link.is_known else _REFUSED))


@dataclass
class Node:
    """A machine of the run; node 0 itself has no link."""

    hello: Hello
    link: Link | None = None

    @property
    def name(self) -> str:
        """Display name."""
        return f"node {self.hello.node} ({self.hello.host})"


def next_event(inbox: Inbox, within_s: float) -> object:
    """Waits for an event; returns None on timeout."""
    try:
        return inbox.get(timeout=max(0.0, within_s))
    except Empty:
        return None


def after_signal(number: int, where: str = "") -> Over:
    """Returns the end of a run that a signal to machine ``where`` ended."""
    said = f"{where} got {Signals(number).name}, passing it on".lstrip()
    return Over(128 + number, said, number)


class Port:
    """Node 0's open port."""

    def __init__(
        self, server: socket.socket, *, inbox: Inbox, silence_s: float, key: str
    ) -> None:
        """Takes over a listening socket; puts ``Arrived`` launchers into ``inbox``."""
        self.address = join_address(*server.getsockname()[:2])
        self._inbox, self._silence_s = inbox, silence_s
        self._refusals = Refusals(lambda why: announce(f"rejected a connection: {why}"))
        self._reception = Reception(
            server, self._admit, door=NODE_0, key=key, refusals=self._refusals
        )
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._is_closed.set()
        self._reception.wake()
        self._thread.join(_FAREWELL_S)

    def _receive(self) -> None:
        while not self._is_closed.is_set():
            self._reception.receive(_POLL_S)
        self._reception.close()

    def _admit(self, peer: Peer, lines: list[bytes]) -> bool:
        try:
            hello = decode(lines[0])
            if not isinstance(hello, Hello):
                raise ValueError("it sent no greeting")
            check_hello(hello)
        except ValueError as error:
            said = f"node 0 does not know this version of tw-launch: {error}"
            over = encode(Over(CANNOT_START, said if peer.is_known else _REFUSED))
            raise Refusal(
                f"it is not a tw-launch of this version: {error}", over
            ) from None
        link = Link(
            peer.line,
            silence_s=self._silence_s,
            received=lines[1:],
            is_known=peer.is_known,
        )
        self._inbox.put(Arrived(link, hello, self._refusals))
        return True


def open_port(
    host: str, port: int, *, within_s: float, inbox: Inbox
) -> socket.socket | Over:
    """Listens at node 0's address, which a run that is ending may still hold."""
    end, has_told = time.monotonic() + within_s, False
    while True:
        where = f"--coordinator {join_address(host, port)}"
        try:
            server = listen(host, port)
            fault = find_unreachable(host, server, "node 0")
            if fault and not is_loopback(host) and not os.environ.get("TW_LISTEN"):
                server.close()
                raise ValueError(f"{where}: {fault}")
            return server
        except OSError as error:
            why = f"{where}: node 0 cannot listen there: {error.strerror}"
            if not may_pass(error) or time.monotonic() >= end:
                raise OSError(why) from None
        if not has_told:
            announce(f"{why}; trying again")
            has_told = True
        match next_event(inbox, _FIRST_RETRY_S):
            case Signalled(number):
                return after_signal(number)


def gather(
    own: Hello, *, num_nodes: int, within_s: float, inbox: Inbox
) -> list[Node] | Over:
    """Waits, as node 0, for all machines; returns them by rank.

    If there will be no run, all that have joined have been sent the returned ``Over``.
    """
    members = {0: Node(own)}
    end = time.monotonic() + within_s
    over: Over | None = None
    while over is None and len(members) < num_nodes:
        match next_event(inbox, end - time.monotonic()):
            case None:
                over = Over(CANNOT_START, _missing(members, num_nodes, within_s))
            case Signalled(number):
                over = after_signal(number, members[0].name)
            case Arrived() as arrived:
                _welcome(members, arrived, num_nodes, inbox)
            case Heard(link, message):
                sender = find_sender(members.values(), link)
                match sender, message:
                    case Node(), Signalled(number) if number in SIGNALS:
                        over = after_signal(number, sender.name)
                    case Node(), Lost(why):
                        del members[sender.hello.node]
                        announce(f"{sender.name} left before the run began: {why}")
    by_rank = [members[rank] for rank in sorted(members)]
    difference = find_unlike_settings(by_rank) if over is None else ""
    if difference:
        over = Over(CANNOT_START, difference)
    if over is None:
        return by_rank
    for member in by_rank:  # Versions are named only to those that are known.
        is_known = member.link is None or member.link.is_known or not difference
        tell([member], over if is_known else replace(over, said=_REFUSED))
    part(by_rank, inbox)
    return over


def reach_node_0(
    host: str,
    port: int,
    hello: Hello,
    *,
    key: str,
    within_s: float,
    silence_s: float,
    inbox: Inbox,
) -> Link | Over:
    """Joins node 0 from another machine.

    An empty ``hello.host`` stands for this end's address of the connection.
    """
    end = time.monotonic() + within_s
    link = _connect(host, port, key, end=end, silence_s=silence_s, inbox=inbox)
    if isinstance(link, Link):
        link.send(replace(hello, host=hello.host or link.own_host))
        link.attend(lambda link, message: inbox.put(Heard(link, message)))
    return link


def find_unlike_settings(members: Sequence[Node]) -> str:
    """Describes versions and options that differ from node 0's; empty if none do.

    >>> hellos = [Hello(n, f"10.0.0.{n}", 1, (), {"Python": f"3.1{n}"}) for n in (1, 2)]
    >>> find_unlike_settings([Node(hello) for hello in hellos])
    'node 1 (10.0.0.1) has Python 3.11, but node 2 (10.0.0.2) has Python 3.12; all ...'
    """
    first, *others = members
    differences = [
        f"{first.name} has {name} {value}, but {other.name} has {name} {theirs}"
        for other in others
        for name, value in first.hello.settings.items()
        if (theirs := other.hello.settings.get(name, "none")) != value
    ]
    if not differences:
        return ""
    return "; ".join(differences) + "; all machines need the same versions and options"


def find_sender(members: Iterable[Node], link: Link) -> Node | None:
    """Returns the machine at the other end of a link, unless it has left."""
    return next((member for member in members if member.link is link), None)


def tell(members: Sequence[Node], message: Message) -> None:
    """Sends a message to all machines but this one."""
    for member in members:
        if member.link is not None:
            member.link.send(message)


def part(members: Sequence[Node], inbox: Inbox) -> None:
    """Waits until the other machines have received the last message.

    Ending with unread messages of theirs would reset the connection, and lose it.
    """
    waiting = [member.link for member in members if member.link is not None]
    for link in waiting:
        link.close()
    end = time.monotonic() + _FAREWELL_S
    while waiting and time.monotonic() < end:
        match next_event(inbox, end - time.monotonic()):
            case Heard(link, Lost()):
                waiting = [other for other in waiting if other is not link]


def _missing(members: Mapping[int, Node], num_nodes: int, within_s: float) -> str:
    ranks = [str(rank) for rank in range(num_nodes) if rank not in members]
    nodes = "node rank" if len(ranks) == 1 else "node ranks"
    return (
        f"{nodes} {', '.join(ranks)} of {num_nodes} did not join within {within_s:g} s "
        "(--start-timeout); start tw-launch on every machine, each with its own "
        "--node-rank"
    )


def _welcome(
    members: dict[int, Node], arrived: Arrived, num_nodes: int, inbox: Inbox
) -> None:
    """Adds a launcher to the members, or rejects it."""
    link, hello = arrived.link, arrived.hello
    theirs = hello.settings.get("--nnodes", "none")
    if theirs != str(num_nodes):
        arrived.turn_away(f"it has --nnodes {theirs}, node 0 has {num_nodes}")
    elif not 0 < hello.node < num_nodes:
        arrived.turn_away(f"its rank must be 1 to {num_nodes - 1}")
    elif hello.node in members:
        taken = members[hello.node].hello.host
        arrived.turn_away(f"rank {hello.node} is already taken by {taken}")
    else:
        member = members[hello.node] = Node(hello, link)
        link.attend(lambda link, message: inbox.put(Heard(link, message)))
        announce(f"{member.name} has joined; {len(members)} of {num_nodes} are here")


def check_hello(hello: Hello) -> None:
    """Refuses a greeting whose fields do not fit together, or no terminal."""
    is_whole = hello.workers == len(hello.ports) and all(
        0 < port < 65536 for port in hello.ports
    )
    names = [hello.host, *hello.settings, *hello.settings.values()]
    is_plain = all(one.isprintable() and len(one) <= _LONGEST_HOST for one in names)
    if not (is_whole and is_plain and hello.host):
        raise ValueError("its greeting is inconsistent")


def _connect(
    host: str, port: int, key: str, *, end: float, silence_s: float, inbox: Inbox
) -> Link | Over:
    """Connects to node 0, which may not be listening yet."""
    retry_s, where = _FIRST_RETRY_S, join_address(host, port)
    while True:
        try:
            return Link(_open_line(host, port, key), silence_s=silence_s)
        except KeyMismatchError as error:
            return Over(CANNOT_START, f"{where}: {error}")
        except ValueError as error:
            return Over(CANNOT_START, f"no tw-launch answers at {where}: {error}")
        except OSError as error:
            fault = error.strerror or str(error)
        match next_event(inbox, min(retry_s, end - time.monotonic())):
            case Signalled(number):
                return after_signal(number)
        if time.monotonic() >= end:
            told = (
                f"node rank 0 cannot be reached at {where} ({fault}); start it, or "
                "open the port to this machine"
            )
            return Over(CANNOT_START, told)
        retry_s = min(2 * retry_s, _LAST_RETRY_S)


def _open_line(host: str, port: int, key: str) -> LineSocket:
    """Connects to node 0, and exchanges proofs of having the key."""
    with contextlib.ExitStack() as opened:
        connection = socket.create_connection((host, port), _CONNECT_S)
        opened.callback(connection.close)
        line = LineSocket(connection, max_bytes=STRANGER_BYTES)
        prove(line, key, NODE_0, timeout_s=_CONNECT_S)
        opened.pop_all()
        return line

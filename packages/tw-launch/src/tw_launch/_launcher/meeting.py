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
from tw_launch._launcher.link import Link, Lost
from tw_launch._launcher.messages import SIGNALS, Hello, Message, Over, Signalled
from tw_launch._launcher.output import announce

CANNOT_START = 2
_HELLO_S = 10.0
_CONNECT_S = 2.0
_FAREWELL_S = 2.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 2.0
_GREETED_AT_ONCE = 32
_ROOM_S = 0.25
_STRANGERS_SAID = 5

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


class Reception:
    """Node 0's open port."""

    def __init__(
        self, server: socket.socket, *, inbox: Inbox, silence_s: float
    ) -> None:
        """Takes over a listening socket; puts ``Arrived`` launchers into ``inbox``."""
        self._server = server
        self.address = join_address(*server.getsockname()[:2])
        self._inbox, self._silence_s = inbox, silence_s
        # A connection holds one of the places until its first message has been read.
        self._places = threading.Semaphore(_GREETED_AT_ONCE)
        self._silent: set[socket.socket] = set()  # connected, but have sent nothing yet
        self._strangers = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while self._server.fileno() >= 0:
            if not self._places.acquire(timeout=_ROOM_S):
                # A launcher sends Hello at once: a client that stays silent is not one.
                # Shutdown ends its ``receive`` in ``_greet``, which frees the place.
                for silent in list(self._silent):
                    with contextlib.suppress(OSError):
                        silent.shutdown(socket.SHUT_RDWR)
                continue
            try:
                connection, _ = self._server.accept()
            except OSError:  # it was closed, or the client is gone already
                self._places.release()
                time.sleep(_FIRST_RETRY_S)
                continue
            self._silent.add(connection)
            threading.Thread(
                target=self._greet, args=(connection,), daemon=True
            ).start()

    def _greet(self, connection: socket.socket) -> None:
        link: Link | None = None
        try:
            link = Link(connection, silence_s=self._silence_s)
            hello = link.receive(_HELLO_S)
            self._silent.discard(connection)
            if not isinstance(hello, Hello):
                raise ValueError("it sent no greeting")
            self._inbox.put(Arrived(link, hello))
        except (OSError, ValueError) as error:
            self._strangers += 1
            why = str(error) or type(error).__name__
            if self._strangers <= _STRANGERS_SAID:
                announce(f"rejected a client that is not a tw-launch: {why}")
            if link is not None:
                # It may be a tw-launch of a version with another Hello.
                said = f"node 0 does not know this version of tw-launch: {why}"
                link.send(Over(CANNOT_START, said))
                link.drop()
        finally:
            self._silent.discard(connection)
            self._places.release()


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
            case Arrived(link, hello):
                _welcome(members, link, hello, num_nodes, inbox)
            case Heard(link, message):
                sender = find_sender(members.values(), link)
                match sender, message:
                    case Node(), Signalled(number) if number in SIGNALS:
                        over = after_signal(number, sender.name)
                    case Node(), Lost(why):
                        del members[sender.hello.node]
                        announce(f"{sender.name} left before the run began: {why}")
    by_rank = [members[rank] for rank in sorted(members)]
    if over is None and (difference := find_unlike_settings(by_rank)):
        over = Over(CANNOT_START, difference)
    if over is None:
        return by_rank
    tell(by_rank, over)
    part(by_rank, inbox)
    return over


def reach_node_0(
    host: str,
    port: int,
    hello: Hello,
    *,
    within_s: float,
    silence_s: float,
    inbox: Inbox,
) -> Link | Over:
    """Joins node 0 from another machine.

    An empty ``hello.host`` stands for this end's address of the connection.
    """
    end = time.monotonic() + within_s
    link = _connect(host, port, end=end, silence_s=silence_s, inbox=inbox)
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
    members: dict[int, Node], link: Link, hello: Hello, num_nodes: int, inbox: Inbox
) -> None:
    """Adds a launcher to the members, or rejects it."""
    member = Node(hello, link)
    theirs = hello.settings.get("--nnodes", "none")
    if theirs != str(num_nodes):
        turn_away(member, f"it has --nnodes {theirs}, node 0 has {num_nodes}")
    elif not 0 < hello.node < num_nodes:
        turn_away(member, f"its rank must be 1 to {num_nodes - 1}")
    elif hello.node in members:
        taken = members[hello.node].hello.host
        turn_away(member, f"rank {hello.node} is already taken by {taken}")
    elif not _is_sound(hello):
        turn_away(member, "its greeting is inconsistent")
    else:
        members[hello.node] = member
        link.attend(lambda link, message: inbox.put(Heard(link, message)))
        announce(f"{member.name} has joined; {len(members)} of {num_nodes} are here")


def turn_away(member: Node, why: str) -> None:
    """Refuses a launcher, and reports why to it and to the user."""
    said = f"{member.name} was rejected: {why}"
    announce(said)
    if member.link is not None:
        member.link.send(Over(CANNOT_START, said))
        member.link.drop()


def _is_sound(hello: Hello) -> bool:
    ports = all(0 < port < 65536 for port in hello.ports)
    return ports and hello.workers == len(hello.ports) and bool(hello.host)


def _connect(
    host: str, port: int, *, end: float, silence_s: float, inbox: Inbox
) -> Link | Over:
    """Connects to node 0, which may not be listening yet."""
    retry_s = _FIRST_RETRY_S
    while True:
        try:
            connection = socket.create_connection((host, port), _CONNECT_S)
            return Link(connection, silence_s=silence_s)
        except OSError as error:
            fault = error.strerror or str(error)
        match next_event(inbox, min(retry_s, end - time.monotonic())):
            case Signalled(number):
                return after_signal(number)
        if time.monotonic() >= end:
            where = join_address(host, port)
            told = (
                f"node rank 0 cannot be reached at {where} ({fault}); start it, or "
                "open the port to this machine"
            )
            return Over(CANNOT_START, told)
        retry_s = min(2 * retry_s, _LAST_RETRY_S)

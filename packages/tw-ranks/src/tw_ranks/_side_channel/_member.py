"""A rank's end of the side channel."""

import contextlib
import logging
import math
import socket
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from tw_launch.internal import (
    MAX_BYTES,
    STRANGER_BYTES,
    KeyMismatchError,
    LineSocket,
    join_address,
    prove,
    read_as,
    write_printable,
)
from tw_ranks._agreement import Exchange
from tw_ranks._side_channel._attendance import (
    Deadlines,
    Report,
    describe_silence,
    describe_slow,
)
from tw_ranks._side_channel._connections import hold_connections, probe, retry_often
from tw_ranks._side_channel._introduction import (
    RANK_0,
    Introduction,
    describe_failure,
    find_interval_s,
)
from tw_ranks._side_channel._packing import unpack

_log = logging.getLogger(__name__)
_AGAIN_S = 0.5
_LONGEST_REFUSAL = 3_000
_SILENT_BEATS = 4
"""After so many beats without an answer from rank 0, a rank knocks."""

_KNOCK_S = 0.5
_TOLD_S = 0.3
"""Rank 0 takes a twentieth of a second to inform all that a rank gives up."""
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib"))


class AbsentError(TimeoutError):
    """Ranks did not join: those in ``ranks``, as far as is known."""

    def __init__(self, message: str, ranks: Sequence[int] = (0,)) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Member:
    """One rank's end of the side channel."""

    def __init__(
        self,
        address: tuple[str, int],
        own: Introduction,
        limits: Deadlines,
        *,
        start_timeout_s: float,
        end_s: float | None = None,
        key: str = "",
    ) -> None:
        """Joins the group: waits for every rank, then sends heartbeats."""
        self.introductions: tuple[Introduction, ...] = ()
        self.missing: dict[int, str] = {}  # Faults by rank.
        self.states: dict[int, str] = {}  # Where ranks were then; {} if 0 is missing.
        self.arrived: tuple[int, ...] = ()  # Ranks furthest ahead; () likewise.
        self._own, self._key = own, key
        self._limits = limits
        self._described: dict[int | str, Exchange] = {}  # Rank 0 may ask for them.
        self._agreed: dict[int | str, tuple[str, int, tuple[str, ...]]] = {}
        self._followed: dict[int, Exchange | None] = {}
        self._next_number = 0
        self._paired: Counter[str] = Counter()
        self._told: Counter[str] = Counter()  # Events not yet waited for.
        self._changed = threading.Condition()
        self._heard_s = self._due_s = time.monotonic()
        self._line_heard_s = self._heard_s  # On the permanent connection.
        self._silent_s = self._heard_s  # Nothing else had arrived there by then.
        self._interval_s = find_interval_s(limits.timeout_s, own.size)
        self._num_reports = 0
        self._beside: dict[str, threading.Thread] = {}  # By name, while they run.
        self._said_bye = False
        self._over_at: int | None = None  # Collectives that rank 0 had entered.
        self._is_agreeing = self._is_asked = False
        self._ended = threading.Event()
        self._on_missing: Callable[[dict[int, str]], None] = lambda missing: None
        self._read_report: Callable[[], Report] = Report
        if end_s is None:
            end_s = time.monotonic() + start_timeout_s
        while not self.introductions:  # Again if rank 0 has no room yet.
            self._line = _connect(address, own, end_s, key)
            self._await_all(address, end_s, start_timeout_s)
        retry_often(self._line.connection, 2 * limits.timeout_s)
        # Not a name, which cannot be looked up in an outage.
        self._rank_0: tuple[str, int] = self._line.connection.getpeername()[:2]
        self._heard_s = self._line_heard_s = self._due_s = time.monotonic()
        self._thread: threading.Thread = threading.Thread(
            target=self._beat, name="tw-ranks-member", daemon=True
        )
        self._thread.start()

    def start(
        self,
        read_report: Callable[[], Report],
        on_missing: Callable[[dict[int, str]], None],
    ) -> None:
        """Starts to report progress; the side channel's thread calls both functions."""
        with self._changed:
            self._read_report, self._on_missing = read_report, on_missing
            missing = self.missing
        if missing:
            on_missing(missing)

    @property
    def num_described(self) -> int:
        """How many collectives matched by order this rank has described."""
        return self._next_number

    @property
    def has_left(self) -> bool:
        """Whether this rank has left, or is about to."""
        return self._said_bye

    def agree(
        self, exchange: Exchange, num_keys: int = 0, *, by_name: bool = False
    ) -> tuple[int, tuple[str, ...]]:
        """Waits until all ranks have described one collective; returns its first key.

        If it is matched ``by_name``, waits only for rank 0, which compares it with the
        descriptions that it has so far. Also returns the paths of rank 0's variables,
        () if this rank's are the same.
        """
        number: int | str
        with self._changed:
            if by_name:
                number = f"{exchange.name} {self._paired[exchange.name]}"
                self._paired[exchange.name] += 1
            else:
                number = self._next_number
                self._next_number += 1
        self._described[number] = exchange
        told = {"digest": asdict(exchange.digest), "keys": num_keys}
        self._say({"do": "agree", "number": number, **told})
        with self._changed:
            self._is_agreeing = True
            self._await(
                lambda: number in self._agreed, 2 * self._limits.first_timeout_s
            )
            self._is_agreeing = False
            if number not in self._agreed:
                raise TimeoutError("A rank is missing.")
            difference, key, names = self._agreed.pop(number)
        if not by_name:  # Other ranks may still describe it by its name.
            del self._described[number]
        if difference:
            raise ValueError(difference)
        return key, names

    def follow(self, is_over: Callable[[], bool], *, is_idle: bool) -> Exchange | None:
        """Waits for the next collective of others; see ``Keys.follow``."""
        with self._changed:
            number = self._next_number
        # Up to date: others may still be in a collective that it has just left.
        told = {"digest": None, "keys": 0, "report": asdict(self._report())}
        self._say({"do": "agree", "number": number, **told})

        def must_look() -> bool:
            is_known = self._followed.get(number) is not None
            return is_known or (is_idle and number in self._followed) or is_over()

        with self._changed:
            self._is_agreeing = is_idle
            self._await(must_look)
            self._is_agreeing = False
            found = self._followed.pop(number, None)
            if found is None and self.missing and not is_over():
                raise TimeoutError("A rank is missing.")
        if found is None or is_over():
            self._say({"do": "unfollow", "number": number})
            return None
        return found

    def tell(self, what: str) -> None:
        """Has rank 0 announce an event to all ranks."""
        self._say({"do": "tell", "what": what})

    def wait_for(self, what: str) -> None:
        """Waits for an event of rank 0; raises TimeoutError if a rank is missing."""
        with self._changed:
            self._is_agreeing = True
            self._await(lambda: self._told[what] > 0, self._limits.stall_timeout_s)
            self._is_agreeing = False
            if not self._told[what]:
                raise TimeoutError("A rank is missing.")
            self._told[what] -= 1

    def look_again(self) -> None:
        """Makes a thread in ``follow`` call its ``is_over`` again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_missing(self, timeout_s: float) -> dict[int, str]:
        """Waits until missing ranks are known; returns their faults, by rank."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.missing), timeout_s)
            return dict(self.missing)

    def tell_failure(self) -> None:
        """Tells rank 0 that TensorFlow has ended a collective of this rank."""
        report = asdict(self._report())  # Of the collective that failed.
        self._say({"do": "failed", "report": report})

    def hold_connections(self) -> None:
        """Makes TensorFlow's connections to other ranks outlast an outage."""
        addresses = [other.address for other in self.introductions if other.address]
        limits = self._limits
        hold_connections(addresses, limits.stall_timeout_s + limits.timeout_s)

    def give_up(self, why: str) -> None:
        """Reports that this rank drops out, and ends its wait."""
        self._say({"do": "lost", "why": why})
        self.wait_for_missing(_TOLD_S)  # Rank 0 informs all ranks, this one included.
        self._lose({self._own.rank: why})

    def close_sockets(self) -> None:
        """Closes the connection in a forked child; it stays open in the parent."""
        self._line.close()

    def leave(self, *, timeout_s: float) -> None:
        """Says goodbye, waits for the others' last exchange, closes the connection."""
        self._said_bye = True
        if not self._ended.is_set():
            report = asdict(self._report())
            message = {"do": "bye", "report": report, "wait_s": timeout_s}
            with contextlib.suppress(OSError):
                self._line.send(message, timeout_s=timeout_s)
        if self._over_at is None:  # Otherwise rank 0 no longer answers.
            self._ended.wait(timeout_s + 1.0)
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)  # It reads from the line.
        self._line.close()
        for thread in list(self._beside.values()):
            thread.join(timeout_s)

    def fail(self, why: str, *, timeout_s: float) -> None:
        """Reports that this rank ends abnormally; ``leave`` closes the connection.

        On rank 0 it waits until all ranks have been informed.
        """
        self._said_bye = True
        self._say({"do": "lost", "why": why, "ends": True})
        self._ended.wait(timeout_s)

    def _await(self, is_there: Callable[[], bool], within_s: float = math.inf) -> None:
        """Waits until ``is_there()`` or a rank is missing; needs ``_changed`` held."""
        end_s = time.monotonic() + within_s
        while not self._changed.wait_for(lambda: is_there() or self.missing, 1.0):
            if self._said_bye or not self._thread.is_alive():
                why = "has left" if self._said_bye else "has lost its side channel"
                self.missing = {self._own.rank: why}
            elif time.monotonic() >= end_s:
                self._lose({0: f"has not answered for {within_s:g} s"})

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # The thread notices.
            self._line.send(message, timeout_s=self._limits.timeout_s)

    def _await_all(
        self, address: tuple[str, int], end_s: float, start_timeout_s: float
    ) -> None:
        """Waits until all ranks have joined, or until this one must reconnect."""
        absent: Sequence[int] = ()
        full = refusal = ""
        is_final, is_open = False, True
        while is_open and not is_final and not self.introductions:
            if not self._line.wait(end_s - time.monotonic()):
                self._line.close()
                told = _describe_absent(absent, start_timeout_s, full)
                raise AbsentError(told, absent or (0,))
            try:
                messages = self._receive()
                is_open = messages is not None
                for message in messages or ():
                    if message["do"] == "refused":
                        why = read_as(str, message.get("why"))
                        refusal = write_printable(why, _LONGEST_REFUSAL)
                        is_final = message.get("again") is not True
                    if message["do"] == "wait":
                        absent = read_as(tuple[int, ...], message.get("absent"))
                        full = read_as(str, message.get("full"))
                    if message["do"] == "welcome":
                        ranks = message.get("ranks")
                        self.introductions = read_as(tuple[Introduction, ...], ranks)
            except OSError:
                is_open = False
            except ValueError as error:
                is_final, refusal = True, _describe_other(address, error)
        if self.introductions:
            return
        self._line.close()
        left_s = end_s - time.monotonic()
        if refusal and (is_final or left_s <= 0):
            raise ValueError(refusal)
        if absent:
            told = _describe_absent(absent, start_timeout_s, full)
            raise AbsentError(told, absent)
        if left_s <= 0:
            closed = f"rank 0 closed the connection to {join_address(*address)}"
            raise AbsentError(closed)
        time.sleep(min(_AGAIN_S, left_s))

    def _receive(self) -> list[dict[str, Any]] | None:
        messages = self._line.receive()
        return None if messages is None else [unpack(message) for message in messages]

    def _beat(self) -> None:
        try:
            self._serve()
        except Exception as error:
            if self._ended.is_set():
                return
            _log.exception("The side-channel thread has ended.")
            why = describe_failure(error)
            self._say({"do": "lost", "why": why})
            self._lose({self._own.rank: why})

    def _serve(self) -> None:
        interval_s = self._interval_s
        while not self._ended.is_set():
            until_s = min(self._due_s, self._heard_s + self._limits.timeout_s)
            until_s = max(until_s, time.monotonic())
            try:
                if self._line.wait(until_s - time.monotonic()):
                    self._hear(self._receive())
                    if self._over_at is None:
                        continue
                    break
                # Not the time now: this thread may have been unable to run since.
                self._silent_s = until_s
                self._due_s = time.monotonic() + interval_s
                if not self._said_bye:
                    report = self._report()
                    if self._is_asked:  # Frames of a thread that runs may vanish.
                        self._is_asked = False
                        report = replace(report, at=_find_place())
                    message = {"do": "beat", "report": asdict(report)}
                    self._line.send(message, timeout_s=self._limits.timeout_s)
                silent_s = until_s - self._heard_s
                if silent_s >= self._limits.timeout_s:
                    self._give_up_rank_0(silent_s)
                elif until_s - self._line_heard_s >= _SILENT_BEATS * interval_s:
                    self._run_beside("knock", self._knock)
            except OSError:
                with contextlib.suppress(OSError, ValueError):
                    while messages := self._receive():  # Sent before the failure.
                        self._hear(messages)
                self._hear(None)
        while self._over_at is not None and not self._ended.wait(interval_s):
            if self._is_agreeing or self._read_report().entered > self._over_at:
                self._lose({0: "has ended, but this rank waits for it"})

    def _report(self) -> Report:
        """Returns how far this rank is, and the number of this report."""
        with self._changed:
            self._num_reports += 1
            made = self._num_reports
        return replace(self._read_report(), made=made)

    def _give_up_rank_0(self, silent_s: float) -> None:
        """Ends this rank's waits, and tells rank 0 why if the network comes back."""
        why = f"has given up, as rank 0 sent nothing for {silent_s:.1f} s"
        with contextlib.suppress(OSError):
            self._line.send({"do": "lost", "why": why}, timeout_s=0.0)
        cut_off = "it or the network to it is gone, or this rank itself is cut off"
        self._lose({0: f"has been silent for {silent_s:.1f} s: {cut_off}"})

    def _run_beside(self, name: str, function: Callable[[], None]) -> None:
        """Runs a function on its own thread, unless it is running already."""
        if name not in self._beside:
            thread = threading.Thread(
                target=self._run_once, args=(name, function), daemon=True
            )
            thread.name = f"tw-ranks-{name}"
            self._beside[name] = thread
            thread.start()

    def _run_once(self, name: str, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:
            _log.exception("The side-channel thread %r has ended.", name)
        finally:
            del self._beside[name]

    def _knock(self) -> None:
        """Reports over short-lived connections while the permanent one is silent.

        After an outage TCP is slow to resend on an old connection. Messages there are
        late, but do arrive.
        """
        interval_s = self._interval_s
        own = asdict(self.introductions[self._own.rank])
        since_s = self._line_heard_s
        while self._line_heard_s == since_s and not self._ended.is_set():
            began_s = time.monotonic()
            report = asdict(self._report())
            message = {"do": "knock", "hello": own, "report": report}
            with (
                contextlib.suppress(OSError, ValueError),
                socket.create_connection(self._rank_0, _KNOCK_S) as connection,
            ):
                line = LineSocket(connection, max_bytes=STRANGER_BYTES)
                prove(line, self._key, RANK_0, timeout_s=_KNOCK_S)
                line.send(message, timeout_s=_KNOCK_S)
                if line.wait(_KNOCK_S) and line.receive():
                    self._heard_s = time.monotonic()
            self._ended.wait(began_s + interval_s - time.monotonic())

    def _probe(self) -> None:
        """Sends rank 0 the state of this rank's connections to other ranks."""
        own, listed = self._own.rank, self.introductions
        others = [other for other in listed if other.rank != own and other.address]
        links = probe({other.rank: other.address for other in others})
        host, told = listed[own].host, {}
        for rank, link in links.items():
            if not (link.fault or link.is_used):  # Most are idle: N^2 of all ranks.
                continue
            other = listed[rank]
            where = f"{other.host} does not answer {host} ({other.address}: "
            fault = link.fault and f"{where}{link.fault})"
            told[rank] = asdict(replace(link, fault=fault))
        self._say({"do": "links", "links": told})

    def _hear(self, messages: list[dict[str, Any]] | None) -> None:
        if messages is None:
            if self._said_bye:
                self._ended.set()
            elif self._over_at is None:
                silent_s = self._silent_s - self._heard_s
                silence = describe_silence(silent_s, self._interval_s)
                closed = "has closed its connection: its process has ended"
                self._lose({0: f"{closed}{silence}"})
            return
        self._heard_s = self._line_heard_s = time.monotonic()
        for message in messages:
            if message["do"] == "agreed":
                with self._changed:
                    names = read_as(tuple[str, ...], message.get("names", []))
                    told_ = message["why"], int(message["key"]), names
                    self._agreed[message["number"]] = told_
                    self._changed.notify_all()
            if message["do"] == "describe":
                exchange = self._described[message["number"]]
                described = {"number": message["number"], "exchange": asdict(exchange)}
                self._say({"do": "description", **described})
            if message["do"] == "followed":
                exchange = read_as(Exchange | None, message["exchange"])
                with self._changed:
                    self._followed[int(message["number"])] = exchange
                    self._changed.notify_all()
            if message["do"] == "told":
                with self._changed:
                    self._told[read_as(str, message["what"])] += 1
                    self._changed.notify_all()
            if message["do"] == "probe":
                self._run_beside("probe", self._probe)
            if message["do"] == "report":
                self._is_asked, self._due_s = True, self._heard_s
            if message["do"] == "slow":
                slow = {int(rank): why for rank, why in message["slow"].items()}
                told = describe_slow(
                    slow,
                    [other.task for other in self.introductions],
                    own=self._own.rank,
                    limit_s=float(message["limit_s"]),
                )
                _log.warning("%s", told)
            if message["do"] == "missing":
                found = {int(rank): why for rank, why in message["missing"].items()}
                states = message.get("states", {})
                self.states = {int(rank): state for rank, state in states.items()}
                self.arrived = tuple(message.get("arrived", ()))
                self._lose(found)
            if message["do"] == "bye":
                self._ended.set()
            if message["do"] == "over":
                self._over_at = int(message["entered"])
                if self._said_bye:
                    self._ended.set()

    def _lose(self, missing: dict[int, str]) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        if self._said_bye:
            return
        with self._changed:
            self.missing = missing
            self._changed.notify_all()
            on_missing = self._on_missing
        on_missing(missing)


def _connect(
    address: tuple[str, int], own: Introduction, end_s: float, key: str
) -> LineSocket:
    wait_s = 0.05
    while True:
        left_s = max(0.1, end_s - time.monotonic())
        with contextlib.ExitStack() as opened:
            try:
                connection = socket.create_connection(address, left_s)
                opened.callback(connection.close)
                line = LineSocket(connection, max_bytes=STRANGER_BYTES)
                prove(line, key, RANK_0, timeout_s=left_s)
                line.max_bytes = MAX_BYTES
                if own.address.startswith(":"):
                    host = str(line.connection.getsockname()[0])
                    port = int(own.address[1:])
                    own = replace(own, address=join_address(host, port))
                line.send({"do": "hello", "hello": asdict(own)}, timeout_s=left_s)
                opened.pop_all()
                return line
            except KeyMismatchError:
                raise
            except ValueError as error:
                raise ValueError(_describe_other(address, error)) from None
            except OSError as error:
                if end_s - time.monotonic() <= wait_s:
                    raise AbsentError(
                        f"rank 0 does not answer at {join_address(*address)} ({error})"
                    ) from None
        time.sleep(wait_s)
        wait_s = min(1.0, 2 * wait_s)


def _describe_other(address: tuple[str, int], error: ValueError) -> str:
    return (
        f"the program that answers at {join_address(*address)} is not rank 0 "
        f"({error}); correct the coordinator's address, or end that program"
    )


def _describe_absent(absent: Sequence[int], waited_s: float, full: str) -> str:
    if not absent:
        return f"rank 0 sent nothing for {waited_s:g} s"
    one = len(absent) == 1
    ranks = ", ".join(map(str, absent))
    cause = f": rank 0 cannot accept their connections ({full})" if full else ""
    return f"rank{'' if one else 's'} {ranks} did not join within {waited_s:g} s{cause}"


def _find_place() -> str:
    """Returns the function and line of the program that the main thread is at."""
    frame = innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if (frame := frame or innermost) is None:
        return ""
    module = frame.f_globals.get("__name__", "?")
    return f"{module}.{frame.f_code.co_name}:{frame.f_lineno}"

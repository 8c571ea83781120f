"""Rank 0's end of the side channel: a thread that answers all ranks."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from dataclasses import asdict
from typing import Any

from tw_syncrep.processes._agreement import Exchange, find_difference
from tw_syncrep.processes._attendance import Attendance, Deadlines, Report
from tw_syncrep.processes._side_channel import (
    Introduction,
    LineSocket,
    find_interval_s,
)

_log = logging.getLogger(__name__)
_TOGETHER_S = 0.1
"""Ranks of one machine that dies are lost one after the other, but almost at once."""

_ANSWER_S = 0.5
"""After that rank 0 asks all others whether they are there, and waits so long."""


class Coordinator:
    """Rank 0's end: a thread that answers all ranks.

    Attributes:
      size: how many ranks there are.
    """

    def __init__(self, listener: socket.socket, size: int, limits: Deadlines) -> None:
        """Starts the thread.

        Args:
          listener: bound and listening; is closed with the thread.
          size: how many ranks there are.
          limits: deadlines.
        """
        self.size = size
        self._limits = limits
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._unknown: dict[LineSocket, float] = {}
        self._sockets: dict[int, LineSocket] = {}
        self._introductions: dict[int, Introduction] = {}
        self._attendance: Attendance | None = None
        self._agreeing: dict[int, dict[int, Exchange | None]] = {}  # None: follows.
        self._agreeing_since: dict[int, float] = {}
        self._missing_since: float | None = None
        self._asked_s: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="tw-syncrep-coordinator", daemon=True
        )
        self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Stops answering, at the latest after ``timeout_s``."""
        self._ended.set()
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._ended.is_set():
                interval_s = min(find_interval_s(self._limits.timeout_s), 0.05)
                for key, _ in self._selector.select(interval_s):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.fileobj)
                self._look()
        except Exception:  # The ranks notice that rank 0 is silent.
            _log.exception("The side channel's thread has ended.")
        finally:
            for line in [*self._sockets.values(), *self._unknown]:
                line.close()
            self._listener.close()
            self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            line = LineSocket(self._listener.accept()[0])
            self._unknown[line] = time.monotonic()
            self._selector.register(line, selectors.EVENT_READ)

    def _read(self, line: Any) -> None:
        try:
            messages = line.receive()
            for message in messages or ():
                self._answer(line, message)
            if messages is not None:
                return
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.debug("A connection to rank 0 is dropped: %r", error)
        self._drop(line)

    def _drop(self, line: LineSocket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        self._unknown.pop(line, None)
        for rank, known in list(self._sockets.items()):
            if known is line:
                del self._sockets[rank]
                if self._attendance is not None:
                    self._attendance.close(rank)
                else:
                    del self._introductions[rank]  # May come again.
        line.close()

    def _answer(self, line: LineSocket, message: dict[str, Any]) -> None:
        if line in self._unknown:
            self._welcome(line, Introduction(**message["hello"]))
            return
        rank = next(rank for rank, known in self._sockets.items() if known is line)
        now_s = time.monotonic()
        if "report" in message and self._attendance is not None:
            self._attendance.hear(rank, Report(**message["report"]), now_s)
            self._send(rank, {"do": "beat"})
        if message["do"] == "agree":
            number, told = int(message["number"]), message["exchange"]
            exchange = None if told is None else Exchange.from_json(told)
            self._agreeing.setdefault(number, {})[rank] = exchange
            if exchange is not None:
                self._agreeing_since.setdefault(number, now_s)
            self._agree(number)
        if message["do"] == "unfollow":
            self._agreeing.get(int(message["number"]), {}).pop(rank, None)
        if message["do"] == "bye" and self._attendance is not None:
            self._attendance.leave(rank)
            self._send(rank, {"do": "bye"})
            if rank == 0:  # With which this thread is about to end.
                entered = self._attendance.ranks[0].report.entered
                for other in list(self._sockets):
                    self._send(other, {"do": "over", "entered": entered})

    def _welcome(self, line: LineSocket, comer: Introduction) -> None:
        refusal = self._find_refusal(comer)
        if refusal:
            line.send({"do": "refused", "why": refusal}, timeout_s=1.0)
            self._drop(line)
            return
        del self._unknown[line]
        self._sockets[comer.rank] = line
        self._introductions[comer.rank] = comer
        if len(self._introductions) < self.size:
            absent = sorted(set(range(self.size)) - set(self._introductions))
            for rank in self._sockets:
                self._send(rank, {"do": "wait", "absent": absent})
            return
        now_s = time.monotonic()
        self._attendance = Attendance(self.size, self._limits, now_s)
        ranks = [asdict(self._introductions[rank]) for rank in range(self.size)]
        for rank in range(self.size):
            self._send(rank, {"do": "welcome", "ranks": ranks})

    def _find_refusal(self, comer: Introduction) -> str:
        if self._attendance is not None:
            return (
                f"the ranks are complete, and {comer.task} comes too late as rank "
                f"{comer.rank}; a rank that was lost comes back when all start again"
            )
        if comer.size != self.size:
            return (
                f"rank 0 expects {self.size} ranks, rank {comer.rank} ({comer.task}) "
                f"{comer.size}"
            )
        if not 0 <= comer.rank < self.size:
            return f"rank must be 0 to {self.size - 1}; {comer.task} has {comer.rank}"
        if comer.rank in self._introductions:
            other = self._introductions[comer.rank].task
            return f"{other} and {comer.task} both are rank {comer.rank}"
        for other_ in self._introductions.values():
            for name, version in other_.versions.items():
                if comer.versions.get(name) != version:
                    return (
                        f"rank {other_.rank} ({other_.task}) has {name} {version}, "
                        f"rank {comer.rank} ({comer.task}) {comer.versions.get(name)}"
                    )
        return ""

    def _agree(self, number: int) -> None:
        brought = self._agreeing[number]
        described = _find_described(brought)
        if described or len(brought) == self.size:
            first = next((e.as_json() for e in described.values()), None)
            for rank in set(brought) - set(described):
                told = {"do": "followed", "number": number, "exchange": first}
                self._send(rank, told)
        if len(described) < self.size:
            return
        del self._agreeing[number], self._agreeing_since[number]
        difference = find_difference([described[rank] for rank in range(self.size)])
        for rank in range(self.size):
            self._send(rank, {"do": "agreed", "number": number, "why": difference})

    def _look(self) -> None:
        """Drops who does not say hello, and tells all who is missing."""
        now_s = time.monotonic()
        for line, since_s in list(self._unknown.items()):
            if now_s - since_s > self._limits.timeout_s:
                self._drop(line)
        if self._attendance is None:
            return
        missing = self._attendance.find_missing(now_s) or self._find_unasked(now_s)
        if not missing:
            self._missing_since = self._asked_s = None
        elif self._missing_since is None:
            self._missing_since = now_s
        elif now_s - self._missing_since >= _TOGETHER_S and self._have_answered(
            missing, now_s
        ):
            states = self._attendance.describe(now_s)
            told = {
                "do": "missing",
                "missing": {str(rank): why for rank, why in missing.items()},
                "states": {str(rank): state for rank, state in states.items()},
                "arrived": self._attendance.find_arrived(),
            }
            for rank in list(self._sockets):
                self._send(rank, told)
            self._ended.set()

    def _have_answered(self, missing: dict[int, str], now_s: float) -> bool:
        """Whether all but the missing have said since that they are there.

        Of ranks that fall silent together each passes the deadline when it does, and a
        process that is killed keeps its connections until the kernel has ended it.
        """
        if self._asked_s is None:
            self._asked_s = now_s
            for rank in list(self._sockets):
                self._send(rank, {"do": "report"})
        is_late = now_s - self._asked_s >= _ANSWER_S
        if is_late or self._attendance is None:
            return is_late
        return set(self._attendance.find_unheard(self._asked_s)) <= set(missing)

    def _find_unasked(self, now_s: float) -> dict[int, str]:
        """Finds who has not described a collective that others wait to agree on."""
        for number, since_s in self._agreeing_since.items():
            if now_s - since_s >= self._limits.first_timeout_s:
                described = _find_described(self._agreeing[number])
                kind = next(iter(described.values())).kind
                return {
                    rank: f"has not come to {kind!r} for {now_s - since_s:.1f} s, to "
                    f"which rank {min(described)} has"
                    for rank in range(self.size)
                    if rank not in described
                }
        return {}

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        """Sends what the rank must take at once, or counts as lost."""
        line = self._sockets.get(rank)
        if line is not None:
            try:
                line.send(message, timeout_s=0.2)
            except OSError:
                self._drop(line)


def _find_described(brought: dict[int, Exchange | None]) -> dict[int, Exchange]:
    """Returns what ranks have described, without those that follow."""
    return {rank: one for rank, one in brought.items() if one is not None}

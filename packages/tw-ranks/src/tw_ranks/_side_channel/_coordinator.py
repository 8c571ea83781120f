"""Rank 0's end of the side channel: a thread that answers all ranks."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tw_launch.internal import (
    MAX_BYTES,
    LineSocket,
    Peer,
    Reception,
    Refusal,
    Refusals,
    parse_messages,
    read_as,
    split_address,
    write_line,
)
from tw_ranks._agreement import FOLLOWED, Agreement, Digest, Exchange
from tw_ranks._side_channel._attendance import (
    Attendance,
    Deadlines,
    Report,
    describe_finished,
)
from tw_ranks._side_channel._connections import (
    PROBE_S,
    Link,
    allow_connections,
    retry_often,
)
from tw_ranks._side_channel._introduction import (
    RANK_0,
    Introduction,
    describe_failure,
    find_interval_s,
)
from tw_ranks._side_channel._packing import write_packed

_log = logging.getLogger(__name__)
_FIRST_KEY = 1 << 18
"""Other users of collectives in a process (``tf.distribute``) count from 1."""

_TOGETHER_S = 0.1
"""When a machine dies, its ranks are lost one after another, but almost at once."""

_ANSWER_S = 0.5
"""How long rank 0 waits after asking all other ranks to confirm that they are there."""

_PROBED_S = PROBE_S + 1.0
"""How long rank 0 waits for ranks to report the state of their connections."""

_LONGEST_TEXT = 1_000
_REFUSED = "rank 0 has refused this process; its log says why"
_BEAT = write_line({"do": "beat"})
_SHARE, _LONGEST_PAUSE_S = 20, 0.25
"""Looks take a twentieth of the time, and are at most so far apart."""


class Coordinator:
    """Rank 0's end: a thread that answers all ranks."""

    def __init__(
        self,
        listener: socket.socket,
        size: int,
        limits: Deadlines,
        *,
        own: Introduction,
        key: str = "",
    ) -> None:
        """Starts the thread, which closes ``listener`` when it ends.

        All ranks must agree with ``own``, rank 0's introduction, and have the ``key``.
        """
        self._most_files = allow_connections(size)
        if self._most_files <= size:
            raise ValueError(
                f"rank 0 needs a file descriptor for each of {size} ranks, but its "
                f"process may open {self._most_files} files; raise the hard limit "
                "(ulimit -Hn) on its machine"
            )
        self.size = size
        self._limits = limits
        self._reception = Reception(
            listener,
            self._admit,
            door=RANK_0,
            key=key,
            refusals=Refusals(
                lambda why: _log.warning("Rank 0 rejected a connection: %s.", why)
            ),
        )
        self._reception.num_awaited = size
        self._selector = selectors.DefaultSelector()
        self._own = own
        self._sockets: dict[int, LineSocket] = {}
        self._ranks: dict[LineSocket, int] = {}  # Inverse of ``_sockets``.
        self._introductions: dict[int, Introduction] = {}
        self._is_complete = False  # All ranks have joined.
        self._attendance = Attendance(size, limits, time.monotonic())
        self._silent_s = time.monotonic()  # Nothing else had arrived by then.
        self._full = ""  # Why it could accept no more connections, as all were sent.
        self._agreeing: dict[int, Agreement] = {}
        self._paired: dict[str, Agreement] = {}  # Named ones.
        self._next_key = _FIRST_KEY
        self._missing_since: float | None = None
        self._asked_s: float | None = None
        self._probed_s: float | None = None
        self._warned_s: float | None = None
        self._leaving: dict[int, float] = {}  # The latest time for each to go.
        self._has_followers = False  # A rank has finished, and follows the others.
        self._must_look = self._must_ask = self._has_comer = False  # Before a wait.
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="tw-ranks-coordinator", daemon=True
        )
        self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Stops the thread, and waits for it for at most ``timeout_s``."""
        self._ended.set()
        self._thread.join(timeout_s)

    def close_sockets(self) -> None:
        """Closes all connections in a forked child; they stay open in the parent."""
        for line in list(self._sockets.values()):
            line.close()
        self._reception.close()

    def _serve(self) -> None:
        self._selector.register(self._reception, selectors.EVENT_READ)
        interval_s = min(find_interval_s(self._limits.timeout_s, self.size), 0.05)
        looked_s, look_s = -interval_s, 0.0
        try:
            while not self._ended.is_set():
                called_s = time.monotonic()
                for key, _ in self._selector.select(interval_s):
                    if key.fileobj is self._reception:
                        self._reception.receive()
                    else:
                        self._read(key.fileobj)
                # Not the time now: this thread may have been unable to run since.
                self._silent_s = called_s
                # The time of a look grows with the ranks: not one per message, unless
                # each may be the awaited answer.
                now_s = time.monotonic()
                is_urgent = self._must_look or self._asked_s is not None
                pause_s = min(_SHARE * look_s, _LONGEST_PAUSE_S)
                if now_s - looked_s >= max(pause_s, 0.0 if is_urgent else interval_s):
                    self._must_look, looked_s = False, now_s
                    began_s = time.thread_time()
                    self._look()
                    look_s = time.thread_time() - began_s
        except Exception as error:
            _log.exception("Rank 0's side-channel thread has ended.")
            self._tell({0: describe_failure(error)})
        finally:
            self.close_sockets()
            self._selector.close()

    def _read(
        self, line: Any, received: Sequence[dict[str, Any]] | None = None
    ) -> None:
        """Answers what a rank has sent, ``received`` already or not."""
        try:
            messages = line.receive() if received is None else received
            known = self._ranks.get(line)
            if known is not None and any("report" in one for one in messages or ()):
                self._send_line(known, _BEAT)  # One answer, however many have arrived.
            for message in messages or ():
                if line.fileno() >= 0:  # An earlier message may have dropped it.
                    self._answer(line, message)
            if messages is not None:
                return
        except Exception as error:  # No peer's message may end the run of the others.
            # A process that said goodbye and ends with unread messages resets it.
            rank = self._ranks.get(line)
            has_left = rank is None or self._attendance.ranks[rank].left
            _log.log(
                logging.DEBUG if has_left else logging.WARNING,
                "Rank 0 dropped a connection: %r",
                error,
            )
        self._drop(line)

    def _drop(self, line: LineSocket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        rank = self._ranks.pop(line, None)
        if rank is not None:
            del self._sockets[rank]
            self._must_look = True
            if self._is_complete:
                self._attendance.close(rank)
            else:
                del self._introductions[rank]  # May reconnect.
        line.close()

    def _answer(self, line: LineSocket, message: dict[str, Any]) -> None:
        rank = self._ranks[line]
        now_s = time.monotonic()
        if "report" in message:
            report = read_as(Report, message["report"])
            self._attendance.hear(rank, report, now_s, self._silent_s)
        if message["do"] == "agree":
            self._hear_digest(rank, message, now_s)
        if message["do"] == "description":
            self._hear_description(rank, message)
        if message["do"] == "unfollow":
            followed = self._agreeing.get(read_as(int, message["number"]))
            if followed is not None:
                followed.digests.pop(rank, None)
        if message["do"] == "tell":
            self._send_all({"do": "told", "what": read_as(str, message["what"])})
        if message["do"] == "bye" and self._is_complete:
            self._attendance.leave(rank)
            self._leaving[rank] = now_s + float(message["wait_s"])
            self._must_look = self._must_ask = True
        if message["do"] == "links":
            links = read_as(dict[str, Link], message["links"])
            found = {int(peer): link for peer, link in links.items()}
            self._attendance.ranks[rank].links = found
            self._must_look = True
        if message["do"] == "failed":
            self._attendance.ranks[rank].failed = True
            self._have_probed(now_s)
        if message["do"] == "lost":
            self._attendance.fail(rank, str(message["why"]))
            # It will have ended before the others could be asked.
            self._missing_since, self._asked_s = now_s - _TOGETHER_S, now_s - _ANSWER_S
            self._must_look = True
            if rank != 0 and message.get("ends"):  # Rank 0 must inform all first.
                self._send(rank, {"do": "bye"})

    def _admit(self, peer: Peer, lines: list[bytes]) -> bool:
        """Admits a rank, or raises why not; answers one that knocks."""
        greeting, *rest = parse_messages(lines)
        if greeting["do"] == "knock":
            self._hear_knock(peer.line, greeting)
            return False
        may_come_again = False
        try:
            comer = _read_introduction(greeting)
        except ValueError as error:
            refusal = f"rank 0 does not recognise this as one of its ranks: {error}"
        else:
            may_come_again = self._may_come_again(comer)
            refusal = self._find_refusal(comer)
        if refusal:
            why = refusal if peer.is_known else _REFUSED
            told = {"do": "refused", "why": why, "again": may_come_again}
            raise Refusal(refusal, write_line(told))
        self._welcome(peer.line, comer)
        self._read(peer.line, rest)
        return True

    def _hear_knock(self, line: LineSocket, message: dict[str, Any]) -> None:
        """Answers a rank whose permanent connection is silent, but still open."""
        comer = _read_introduction(message)
        known = self._introductions.get(comer.rank)
        if self._is_complete and comer.rank in self._sockets and comer == known:
            report = read_as(Report, message["report"])
            now_s = time.monotonic()
            self._attendance.hear(comer.rank, report, now_s, self._silent_s)
            line.send({"do": "beat"}, timeout_s=0.0)

    def _welcome(self, line: LineSocket, comer: Introduction) -> None:
        line.max_bytes = MAX_BYTES
        retry_often(line.connection, 2 * self._limits.timeout_s)  # Fails if it is gone.
        self._selector.register(line, selectors.EVENT_READ)
        self._sockets[comer.rank], self._ranks[line] = line, comer.rank
        self._introductions[comer.rank] = comer
        if len(self._introductions) < self.size:
            self._has_comer = True
            return
        self._is_complete, self._reception.num_awaited = True, 0
        self._attendance = Attendance(self.size, self._limits, time.monotonic())
        ranks = [asdict(self._introductions[rank]) for rank in range(self.size)]
        self._send_all({"do": "welcome", "ranks": ranks})

    def _may_come_again(self, comer: Introduction) -> bool:
        """Whether this group will soon make room for the newcomer's.

        It is if the newcomer belongs to a later start of the same run, or replaces a
        lost rank.
        """
        if comer.run != self._own.run:
            return False
        is_later = comer.start > self._own.start
        is_lost = self._is_complete and comer.rank not in self._sockets
        return is_later or (is_lost and 0 <= comer.rank < self.size == comer.size)

    def _find_refusal(self, comer: Introduction) -> str:
        own = self._own
        if (comer.run, comer.start) != (own.run, own.start):
            return _describe_other_run(own, comer)
        if self._is_complete:
            return (
                f"all ranks have joined, and {comer.task} is too late as rank "
                f"{comer.rank}; to replace a lost rank, restart all ranks"
            )
        if comer.size != self.size:
            return (
                f"rank 0 expects {self.size} ranks, but rank {comer.rank} "
                f"({comer.task}) expects {comer.size}"
            )
        if not 0 <= comer.rank < self.size:
            return f"rank must be 0 to {self.size - 1}; {comer.task} has {comer.rank}"
        other = self._introductions.get(comer.rank)
        if other is None and comer.rank == 0 and comer != own:
            other = own
        if other is not None:
            return f"{other.task} and {comer.task} are both rank {comer.rank}"
        for name, version in own.versions.items():
            if comer.versions.get(name) != version:
                return (
                    f"rank 0 ({own.task}) has {name} {version}, but rank {comer.rank} "
                    f"({comer.task}) has {comer.versions.get(name)}"
                )
        return ""

    def _hear_digest(self, rank: int, message: dict[str, Any], now_s: float) -> None:
        """Compares a collective's digest with those of other ranks."""
        number = message["number"]  # Name and place, if it is matched by name.
        number = read_as(str if isinstance(number, str) else int, number)
        digest = read_as(Digest | None, message["digest"])
        self._attendance.ranks[rank].finished = digest is None
        one = self._agreements(number).setdefault(number, Agreement())
        one.digests[rank] = digest
        if digest is None:
            self._has_followers = True
            for other in (*self._agreeing.values(), *self._paired.values()):
                other.informed.discard(rank)
        elif not one.key:
            one.key, one.since_s = self._next_key, now_s
            self._next_key += read_as(int, message["keys"])
        self._compare(number, rank)

    def _hear_description(self, rank: int, message: dict[str, Any]) -> None:
        """Records a description for which it has asked a rank."""
        number = message["number"]
        one = self._agreements(number).get(number)
        if one is None or rank not in one.asked:
            return
        exchange = read_as(Exchange, message["exchange"])
        if exchange.digest != one.digests.get(rank):
            raise ValueError(f"rank {rank} has described {exchange} in two ways")
        one.exchanges[rank] = exchange
        for waiting in sorted(one.unanswered) if isinstance(number, str) else [rank]:
            self._compare(number, waiting)
        self._inform_followers()

    def _agreements(self, number: int | str) -> dict[Any, Agreement]:
        return self._paired if isinstance(number, str) else self._agreeing

    def _compare(self, number: int | str, rank: int) -> None:
        if isinstance(number, str):
            self._pair(number, rank)
        elif len(self._agreeing[number].digests) == self.size:
            self._agree(number)
        self._inform_followers()

    def _agree(self, number: int) -> None:
        one = self._agreeing[number]
        described, different = one.described, one.find_different()
        if not described:  # All have finished.
            self._send_all({"do": "followed", "number": number, "exchange": None})
        if len(described) < self.size:
            return
        renamed = {r for r, d in described.items() if d.whole != described[0].whole}
        if not self._have_described(number, different or ([0] if renamed else [])):
            return
        del self._agreeing[number]
        told = {"do": "agreed", "number": number, "key": one.key}
        told["why"] = one.find_difference(different)
        own = [t.name for t in one.exchanges[0].tensors] if 0 in one.exchanges else []
        line, renaming = write_packed(told), write_packed({**told, "names": own})
        for rank in reversed(range(self.size)):  # As to all.
            is_renamed = rank in renamed and not different
            self._send_line(rank, renaming if is_renamed else line)

    def _pair(self, name: str, rank: int) -> None:
        """Compares a named exchange with other ranks' descriptions under its name.

        No rank waits: ranks that build named exchanges in different orders would wait
        for each other. A rank that has gone on cannot finish an exchange without the
        ranks that have not described it.
        """
        one = self._paired[name]
        first = next(iter(one.described.values()))  # All others were compared with it.
        is_equal = one.described[rank].whole == first.whole
        different = [] if is_equal else one.find_different()
        one.unanswered.add(rank)
        if not self._have_described(name, different):
            return
        one.unanswered.remove(rank)
        difference = one.find_difference(different)
        for other in one.described if difference else ():
            if other != rank:
                self._send(other, {"do": "missing", "missing": {rank: difference}})
        told = {"do": "agreed", "number": name, "key": one.key}
        self._send(rank, {**told, "why": difference})
        if len(one.described) == self.size and not one.unanswered:
            del self._paired[name]

    def _have_described(self, number: int | str, ranks: Sequence[int]) -> bool:
        """Whether ranks have described an exchange; asks those that have not."""
        one = self._agreements(number)[number]
        for rank in {*ranks} - one.asked:
            self._send(rank, {"do": "describe", "number": number})
            one.asked.add(rank)
        return one.exchanges.keys() >= {*ranks}

    def _inform_followers(self) -> None:
        """Sends ranks that follow the exchanges that they have not described."""
        if not self._has_followers:
            return
        for number, awaited in list(self._agreeing.items()):
            followers = awaited.digests.keys() - awaited.described.keys()
            self._inform(followers, number, number)
            for name, one in self._paired.items():
                self._inform(followers - one.digests.keys(), number, name)

    def _inform(self, followers: set[int], number: int, described: int | str) -> None:
        """Sends an exchange, once, to ranks that wait for one under ``number``."""
        one = self._agreements(described)[described]
        followers = followers - one.informed
        if not followers or not one.described:
            return
        source = next(iter(one.exchanges), min(one.described))
        if self._have_described(described, [source]):
            told = {"do": "followed", "number": number}
            line = write_packed({**told, "exchange": asdict(one.exchanges[source])})
            for rank in followers:
                self._send_line(rank, line)
            one.informed |= followers

    def _look(self) -> None:
        """Drops late strangers, and reports missing ranks to all."""
        now_s = time.monotonic()
        self._reception.receive()
        if not self._is_complete:
            full = self._reception.full
            if self._has_comer or full != self._full:
                absent = sorted(set(range(self.size)) - set(self._introductions))
                limit = f"{full}; its process may open {self._most_files}"
                told = {"do": "wait", "absent": absent, "full": full and limit}
                self._send_all(told)
                self._has_comer, self._full = False, full
            return
        self._let_go(now_s)
        awaited = {
            rank
            for one in self._agreeing.values()
            if one.digests
            for rank in range(self.size)
            if one.digests.get(rank) is None
        }
        missing = self._attendance.find_missing(self._silent_s, awaited)
        missing = missing or self._find_unasked(self._limits.first_timeout_s)
        if not missing:
            self._missing_since = None
            self._warn(now_s)
        elif self._missing_since is None:
            self._missing_since = now_s
        elif now_s - self._missing_since >= _TOGETHER_S and self._have_answered(now_s):
            limit_s = self._limits.stall_timeout_s
            doubts_links = self._attendance.doubts_links(self._silent_s, limit_s)
            if not doubts_links or self._have_probed(now_s):
                self._tell(missing)
                self._ended.set()

    def _let_go(self, now_s: float) -> None:
        """Answers goodbyes once all others have completed their last exchange.

        Data that a process has sent in it may still be in that process's memory.
        """
        slowest = self._attendance.find_slowest() if self._leaving else 0
        for rank, until_s in list(self._leaving.items()):
            completed = self._attendance.ranks[rank].report.completed
            if now_s < until_s and slowest < completed:  # By the latest reports.
                if self._must_ask:
                    self._send_all({"do": "report"})
                    self._must_ask = False
                continue
            del self._leaving[rank]
            self._send(rank, {"do": "bye"})
            if rank == 0:  # This thread is about to end with it.
                entered = self._attendance.ranks[0].report.entered
                self._send_all({"do": "over", "entered": entered})

    def _warn(self, now_s: float) -> None:
        """Warns all ranks about those that report, but hold the others up."""
        warning_s, limit_s = self._limits.warning_s, self._limits.stall_timeout_s
        slow = self._attendance.find_slow(self._silent_s)
        if not slow:
            slow = self._find_unasked(warning_s)
            limit_s = self._limits.first_timeout_s
        if not slow:
            self._warned_s = self._asked_s = None
            if not self._attendance.has_failed:
                self._probed_s = None
        elif self._warned_s is None or now_s - self._warned_s >= warning_s:
            if not self._have_answered(now_s):
                return
            doubts_links = self._attendance.doubts_links(self._silent_s, warning_s)
            if doubts_links and not self._have_probed(now_s):
                return
            self._warned_s, self._asked_s, self._probed_s = now_s, None, None
            states = self._attendance.describe(self._silent_s)
            told = {rank: f"{slow[rank]}; it {states[rank]}" for rank in slow}
            self._send_all({"do": "slow", "slow": told, "limit_s": limit_s})

    def _tell(self, missing: dict[int, str]) -> None:
        """Reports to all ranks the missing ones, and where every rank is."""
        self._send_all(
            {
                "do": "missing",
                "missing": missing,
                "states": self._attendance.describe(self._silent_s),
                "arrived": self._attendance.find_arrived(),
            }
        )

    def _have_answered(self, now_s: float) -> bool:
        """Whether all ranks but those gone have reported since they were asked.

        Ranks that fall silent together pass the deadline one after another, and a
        killed process keeps its connections until the kernel has ended it. The others
        report the line that they are at.
        """
        if self._asked_s is None:
            self._asked_s = now_s
            self._send_all({"do": "report"})
        is_late = now_s - self._asked_s >= _ANSWER_S
        unheard = self._attendance.find_unheard(self._asked_s, self._silent_s)
        return is_late or not unheard

    def _have_probed(self, now_s: float) -> bool:
        """Whether all ranks have checked their connections since they were asked."""
        if self._probed_s is None:
            self._probed_s = now_s
            self._attendance.forget_links()
            self._send_all({"do": "probe"})
        return now_s - self._probed_s >= _PROBED_S or self._attendance.has_links

    def _find_unasked(self, limit_s: float) -> dict[int, str]:
        """Finds ranks that have not described a collective that others wait for."""
        for one in self._agreeing.values():
            kinds = {rank: digest.kind for rank, digest in one.described.items()}
            needing_all = [rank for rank in kinds if kinds[rank] not in FOLLOWED]
            finished = [rank for rank in one.digests if rank not in kinds]
            waited_s = self._silent_s - one.since_s
            if needing_all and finished:
                waiting = min(needing_all)
                told = describe_finished(waiting, repr(kinds[waiting]))
                return dict.fromkeys(finished, told)
            if kinds and waited_s >= limit_s:
                kind = next(iter(kinds.values()))
                return {
                    rank: f"has not reached {kind!r} after {waited_s:.1f} s; "
                    f"rank {min(kinds)} is waiting there"
                    for rank in range(self.size)
                    if rank not in kinds
                }
        return {}

    def _send_all(self, message: dict[str, Any]) -> None:
        """Sends to all, to rank 0 last, whose process may end because of it."""
        written = write_packed(message)
        for rank in sorted(self._sockets, reverse=True):
            self._send_line(rank, written)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        self._send_line(rank, write_packed(message))

    def _send_line(self, rank: int, written: bytes) -> None:
        """Sends a message; a rank that does not accept it at once is lost."""
        line = self._sockets.get(rank)
        if line is not None:
            try:
                line.send_line(written, timeout_s=0.2)
            except OSError:
                self._drop(line)


def _read_introduction(message: dict[str, Any]) -> Introduction:
    """Reads a greeting, which any peer may send; raises ValueError."""
    comer: Introduction = read_as(Introduction, message.get("hello"))
    if comer.address:
        split_address(comer.address)
    for text in (comer.task, comer.machine, comer.run, *comer.versions.values()):
        if len(text) > _LONGEST_TEXT or not text.isprintable():
            raise ValueError(f"expected a name, got {text[:60]!r}")
    return comer


def _describe_other_run(own: Introduction, comer: Introduction) -> str:
    """Explains why a rank of another run, or of another start of it, is refused."""
    if comer.run == own.run:
        return (
            f"rank {comer.rank} ({comer.task}) belongs to start {comer.start} of "
            f"{own.run}, but rank 0 ({own.task}) to start {own.start}; end the process "
            "of the earlier start, which is left over"
        )
    return (
        f"rank {comer.rank} ({comer.task}) is from {comer.run or 'no named run'}, but "
        f"rank 0 ({own.task}) is from {own.run or 'no named run'}; give each job its "
        "own coordinator address, and all ranks of a job the same TW_RUN_ID"
    )

"""Attendance: rank 0 infers from the ranks' reports which of them are missing.

A few times a second every rank reports to rank 0 how many collectives it has entered.
A silent rank has a short deadline: it is missing at once if its connection closed
without a goodbye or its program failed, otherwise after ``timeout_s`` of silence. A
rank that still reports is alive: it may evaluate, save or compile for minutes. While it
holds the others up they are warned, and it is missing only after ``stall_timeout_s``.
It may be outside a collective that others have entered, or inside one that all have
entered: a connection between ranks may have stalled there, but a large exchange on a
slow network looks the same from here. Ranks that wait in different collectives, and can
begin no other meanwhile, are named at once: neither collective can end. Those of one
function can begin in any order.

A rank that is gone holds others up, some of them inside a collective that the rest have
completed. So no rank counts as behind while it is inside one, or while another is gone.
"""

import bisect
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tw_ranks._side_channel._connections import Link
from tw_ranks._side_channel._introduction import find_interval_s

_MISMATCH_BEATS = 4
_OUTAGE_S, _OUTAGE_BEATS = 1.0, 4
"""A silence as long as these is reported, in case the rank is lost soon after."""


@dataclass(frozen=True)
class Deadlines:
    """How long ranks wait, in seconds."""

    timeout_s: float  # For a silent rank.
    first_timeout_s: float  # For a reporting rank's first or newly traced collective.
    stall_timeout_s: float = 600.0  # For a reporting rank that holds others up.
    warning_s: float = 60.0  # Before each warning about such a rank.


@dataclass(frozen=True)
class Report:
    """A rank's progress, by its own account."""

    entered: int = 0  # Number of collectives.
    completed: int = 0
    traced: int = 0  # ``entered`` when it last traced a collective.
    inside: str = ""  # Kind of the collective that it traced last.
    at: str = ""  # Line that its main thread was at when last asked.
    number: int = 0  # Of the one it waits in; 0: none, or it can start others.
    among: int = 0  # Those that can start meanwhile have this in common; 0: none can.
    order: str = ""  # Collectives of this name cannot start meanwhile; "": none can.
    what: str = ""  # Its current collective, described; "" unless exactly one.
    needing_all: int = 0  # How many of ``entered`` also need finished ranks.
    made: int = 0  # Number of this report; one on another connection may be newer.


@dataclass
class Rank:
    """One rank, as far as rank 0 knows."""

    heard_s: float  # Time of the latest report.
    report: Report = field(default_factory=Report)
    entered_s: float = 0.0  # Time of the first report of ``report.entered``.
    moved_s: float = 0.0  # Time of the latest report of progress.
    closed: bool = False  # Its connection is closed.
    left: bool = False  # With a goodbye.
    fault: str = ""  # Why it dropped out, if it reported that itself.
    finished: bool = False  # Has no more data, and follows the others.
    failed: bool = False  # TensorFlow has ended the collective that it is in.
    links: Mapping[int, Link] | None = None  # To other ranks; None: not known.
    outage_s: float = 0.0  # The latest long silence.
    back_s: float = -math.inf  # Time at which it ended.


class Attendance:
    """Rank 0's record of all ranks; times are seconds of one clock."""

    def __init__(self, size: int, deadlines: Deadlines, now_s: float) -> None:
        """Counts each of ``size`` ranks as heard from at ``now_s``."""
        self.ranks = [Rank(now_s, entered_s=now_s, moved_s=now_s) for _ in range(size)]
        self.deadlines = deadlines
        self.interval_s = find_interval_s(deadlines.timeout_s, size)
        # The most collectives that a rank had entered, and the time it reached each.
        self._fronts, self._fronts_s = [0], [now_s]

    def hear(
        self, rank: int, report: Report, now_s: float, silent_s: float | None = None
    ) -> None:
        """Records a rank's report, before which nothing had arrived by ``silent_s``.

        Rank 0 may have been late in reading it (None: it was not).
        """
        speaker = self.ranks[rank]
        if report.made < speaker.report.made:
            return
        outage_s = (now_s if silent_s is None else silent_s) - speaker.heard_s
        if describe_silence(outage_s, self.interval_s):
            speaker.outage_s, speaker.back_s = outage_s, now_s
        before = speaker.report.entered
        if report.entered != before:
            speaker.entered_s, speaker.failed = now_s, False
        if _progress(report) != _progress(speaker.report):
            speaker.moved_s = now_s
        elif not report.at:  # It was not asked this time.
            report = replace(report, at=speaker.report.at)
        speaker.heard_s, speaker.report = now_s, report
        if report.entered < before:  # Not from one of our ranks.
            front = max(other.report.entered for other in self.ranks)
            self._fronts = [min(front, one) for one in self._fronts]
        if report.entered > self._fronts[-1]:
            self._fronts.append(report.entered)
            self._fronts_s.append(now_s)
        if len(self._fronts) > 100 + 2 * len(self.ranks):
            self._forget_fronts()

    def _forget_fronts(self) -> None:
        """Keeps only times since which ranks are behind: few, so that this is rare."""
        kept = {self._find_front(rank) for rank in self.ranks} | {len(self._fronts)}
        kept = {min(place, len(self._fronts) - 1) for place in kept}
        self._fronts_s = [self._fronts_s[place] for place in sorted(kept)]
        self._fronts = [self._fronts[place] for place in sorted(kept)]

    def _find_front(self, rank: Rank) -> int:
        """Returns the place of the first front that was ahead of a rank's report."""
        return bisect.bisect_right(self._fronts, rank.report.entered)

    def _find_behind_s(self, rank: Rank) -> float | None:
        """Returns the time since which others are ahead of a rank, None if none is."""
        place = self._find_front(rank)
        is_behind = place < len(self._fronts)
        return max(self._fronts_s[place], rank.entered_s) if is_behind else None

    def leave(self, rank: int) -> None:
        """Records that a rank has said goodbye."""
        self.ranks[rank].left = True

    def fail(self, rank: int, fault: str) -> None:
        """Records that a rank's program ends abnormally."""
        self.ranks[rank].fault = self.ranks[rank].fault or fault

    def close(self, rank: int) -> None:
        """Records that a rank's connection has closed."""
        self.ranks[rank].closed = True

    def find_missing(
        self, now_s: float, awaited: Collection[int] = ()
    ) -> dict[int, str]:
        """Returns the faults of missing ranks, by rank.

        Other ranks wait for those ``awaited`` outside of collectives.
        """
        gone = {
            number: fault
            for number, rank in enumerate(self.ranks)
            if (fault := self._find_end(rank, now_s, is_awaited=number in awaited))
        }
        others = range(1, len(self.ranks))
        if sorted(gone) == [*others] and all(
            self._is_silent(self.ranks[number], now_s) for number in others
        ):
            itself = "no other rank answers, so rank 0 itself may be cut off"
            gone = {number: f"{fault}: {itself}" for number, fault in gone.items()}
        limits = self.deadlines
        first_s = max(limits.first_timeout_s, limits.stall_timeout_s)
        return (
            gone
            or self._find_finished()
            or self._find_mismatch()
            or (self._find_broken("") if self.has_failed else {})
            or self._find_stall(now_s, limits.stall_timeout_s, first_s)
        )

    def find_slow(self, now_s: float) -> dict[int, str]:
        """Returns faults of ranks that report, but have long held the others up."""
        warning_s = self.deadlines.warning_s
        return self._find_stall(now_s, warning_s, warning_s)

    @property
    def has_failed(self) -> bool:
        """Whether TensorFlow has ended a collective that a rank is in."""
        return any(rank.failed for rank in self.ranks)

    @property
    def has_links(self) -> bool:
        """Whether all ranks have checked their connections since ``forget_links``."""
        return all(rank.links is not None for rank in self.ranks)

    def forget_links(self) -> None:
        """Forgets the state of ranks' connections, which they are to check again."""
        for rank in self.ranks:
            rank.links = None

    def doubts_links(self, now_s: float, limit_s: float) -> bool:
        """Whether a connection between ranks may be holding them up."""
        if any(self._find_end(rank, now_s, is_awaited=False) for rank in self.ranks):
            return False
        return self.has_failed or bool(self._find_stuck(now_s, limit_s))

    def describe(self, now_s: float) -> dict[int, str]:
        """Describes where each rank is, by rank."""
        return {number: _tell(rank, now_s) for number, rank in enumerate(self.ranks)}

    def find_arrived(self) -> list[int]:
        """Returns the ranks that have entered the latest collective."""
        front = max(rank.report.entered for rank in self.ranks)
        here = enumerate(self.ranks)
        return [number for number, rank in here if rank.report.entered == front]

    def find_unheard(self, since_s: float, now_s: float) -> list[int]:
        """Returns the ranks that have not reported since then, but may be alive."""
        return [
            number
            for number, rank in enumerate(self.ranks)
            if rank.heard_s < since_s
            and not rank.left
            and not self._find_end(rank, now_s, is_awaited=False)
        ]

    def find_slowest(self) -> float:
        """Returns how many collectives every remaining rank has completed."""
        here = (r for r in self.ranks if not (r.left or r.closed or r.fault))
        return min((rank.report.completed for rank in here), default=math.inf)

    def _find_mismatch(self) -> dict[int, str]:
        """Finds ranks that wait in a different collective from most.

        Each must have reported again after all had entered theirs: reports may be old.
        A rank that has completed fewer may be in one that the others have left: the
        root of a broadcast goes on once it has sent, while a slow link still delivers.
        """
        ahead = max(rank.report.completed for rank in self.ranks)
        held = {
            n: rank
            for n, rank in enumerate(self.ranks)
            if rank.report.number and rank.report.completed == ahead
        }
        for order in sorted({rank.report.order for rank in held.values()}):
            among = {n: r for n, r in held.items() if r.report.order == order}
            since_s = max(rank.moved_s for rank in among.values())
            heard_s = min(rank.heard_s for rank in among.values())
            if heard_s - since_s < _MISMATCH_BEATS * self.interval_s:
                continue
            [(usual, _)] = Counter(map(_among, among.values())).most_common(1)
            most = {n: rank for n, rank in among.items() if _among(rank) == usual}
            numbers = {rank.report.number for rank in most.values()}
            others = {
                n: rank
                for n, rank in among.items()
                if n not in most and rank.report.number not in numbers
            }
            if not others:
                continue
            first = min(most)
            return {
                n: f"is in {rank.report.what}, rank {first} in "
                f"{among[first].report.what}: ranks wait in different collectives, but "
                "must run the same ones in the same order"
                for n, rank in others.items()
            }
        return {}

    def _find_end(self, rank: Rank, now_s: float, *, is_awaited: bool) -> str:
        """Returns why a rank no longer answers, or ""."""
        silent_s = now_s - rank.heard_s
        was_silent = describe_silence(silent_s, self.interval_s)
        if not was_silent and now_s - rank.back_s < self.deadlines.timeout_s:
            was_silent = describe_silence(rank.outage_s, self.interval_s)
        if rank.fault:
            return f"{rank.fault}{was_silent}"
        if rank.left:
            is_awaited = is_awaited or self._find_behind_s(rank) is not None
            return "has ended, but others wait for it" if is_awaited else ""
        if rank.closed:
            return f"has closed its connection: its process has ended{was_silent}"
        is_silent = self._is_silent(rank, now_s)
        return f"has been silent for {silent_s:.1f} s" if is_silent else ""

    def _is_silent(self, rank: Rank, now_s: float) -> bool:
        """Whether a rank whose connection is open has not reported for too long."""
        is_late = now_s - rank.heard_s >= self.deadlines.timeout_s
        return is_late and not (rank.closed or rank.left or rank.fault)

    def _find_finished(self) -> dict[int, str]:
        """Finds finished ranks that are missing where all are needed."""
        counts = [rank.report.needing_all for rank in self.ranks]
        most = max(counts)
        return {
            number: describe_finished(counts.index(most), "a collective")
            for number, rank in enumerate(self.ranks)
            if rank.finished and counts[number] < most
        }

    def _find_stall(
        self, now_s: float, limit_s: float, first_s: float
    ) -> dict[int, str]:
        """Finds ranks that report, but have held the others up for ``limit_s``."""
        behind = {
            number: fault
            for number, rank in enumerate(self.ranks)
            if (fault := self._find_delay(rank, now_s, limit_s, first_s))
        }
        return behind or self._find_stuck(now_s, limit_s)

    def _find_delay(
        self, rank: Rank, now_s: float, limit_s: float, first_s: float
    ) -> str:
        """Describes how late a rank is for a collective; "" if it is not late."""
        report = rank.report
        if rank.left or report.completed < report.entered:
            return ""
        since_s = self._find_behind_s(rank)
        is_new = report.entered == 0 or report.entered == report.traced
        if since_s is None or now_s - since_s < (first_s if is_new else limit_s):
            return ""
        return (
            f"has not entered collective {report.entered + 1} for "
            f"{now_s - since_s:.1f} s, but others have"
        )

    def _find_stuck(self, now_s: float, limit_s: float) -> dict[int, str]:
        """Finds ranks stuck in a collective that all have entered, or faulty links.

        Connections between ranks, where known, tell more than the collectives.
        """
        all_entered = min(rank.report.entered for rank in self.ranks)
        still_s = now_s - max(rank.moved_s for rank in self.ranks)
        if still_s < limit_s:
            return {}
        stuck = {
            number: rank.report
            for number, rank in enumerate(self.ranks)
            if rank.report.completed < all_entered
        }
        told = f"has been inside collective {all_entered} for {still_s:.1f} s and "
        if stuck and (
            ends := self._find_broken(told) or self._find_slow_links(all_entered)
        ):
            return ends
        inside = {number: repr(report.inside) for number, report in stuck.items()}
        if all(report.what for report in stuck.values()):  # More exact than traced.
            inside = {number: report.what for number, report in stuck.items()}
        return {
            number: (
                f"has been inside {inside[number]}, its collective {report.entered}, "
                f"for {still_s:.1f} s, while others are inside another one: the ranks' "
                "programs differ"
                if len(set(inside.values())) > 1
                else f"has been inside collective {all_entered} for {still_s:.1f} s "
                "(all have entered it): a connection between ranks is lost or slow"
            )
            for number, report in stuck.items()
        }

    def _find_broken(self, told: str) -> dict[int, str]:
        """Finds the ends of connections that ranks cannot make.

        Collectives need those between neighbours in TensorFlow's ring, where each rank
        receives from the one before it. ``told`` begins the fault of each rank.
        """
        broken = {
            (rank, peer): link.fault
            for rank, peer, link in self._find_links()
            if link.fault
        }
        size = len(self.ranks)
        beside = {
            (rank, peer): fault
            for (rank, peer), fault in broken.items()
            if (rank - peer) % size in (1, size - 1)
        }
        broken = beside or broken
        named = _find_ends(broken)
        faults: dict[int, list[str]] = {rank: [] for rank in named}
        for (rank, peer), fault in broken.items():
            if rank in named:
                is_next = (rank - peer) % size == 1
                verb = "waits for" if is_next else "cannot reach"
                faults[rank].append(f"{told}{verb} rank {peer}: {fault}")
            if peer in named and (peer, rank) not in broken:
                faults[peer].append(f"cannot be reached by rank {rank}: {fault}")
        return {rank: ", and ".join(faults[rank]) for rank in named}

    def _find_slow_links(self, number: int) -> dict[int, str]:
        """Finds the ends of the few connections on which data still arrives.

        In a ring the others are idle. If all are in use, none is slow.
        """
        used = {
            (rank, peer): f"{link.bytes_per_s / 1000:.1f} kB/s"
            for rank, peer, link in self._find_links()
            if link.is_used
        }
        named = _find_ends(used)
        if len(named) > 2:
            return {}
        return {
            end: f"is at an end of the connection that collective {number} waits for: "
            + ", and ".join(
                f"it receives {speed} from rank {peer}"
                if rank == end
                else f"rank {rank} receives {speed} from it"
                for (rank, peer), speed in used.items()
                if end in (rank, peer)
            )
            for end in named
        }

    def _find_links(self) -> list[tuple[int, int, Link]]:
        """Returns each rank, a peer of it, and the link to this peer."""
        return [
            (number, peer, link)
            for number, rank in enumerate(self.ranks)
            for peer, link in (rank.links or {}).items()
        ]


def _find_ends(links: Collection[tuple[int, int]]) -> list[int]:
    """Returns the rank that several connections all have in common, else all ends."""
    pairs = {frozenset(pair) for pair in links}
    common = frozenset.intersection(*pairs) if len(pairs) > 1 else frozenset()
    return sorted(common or frozenset().union(*pairs))


def describe_silence(silent_s: float, interval_s: float) -> str:
    """Says that a lost rank had been silent before, if it was for long.

    Ranks report once in ``interval_s``.
    """
    if silent_s < max(_OUTAGE_S, _OUTAGE_BEATS * interval_s):
        return ""
    return (
        f"; before that it was silent for {silent_s:.1f} s: its process was stopped, "
        "or its network failed"
    )


def _tell(rank: Rank, now_s: float) -> str:
    """Describes where a rank is, and since when."""
    if rank.left:
        return f"has left after {rank.report.completed} collectives"
    still_s, silent_s = now_s - rank.moved_s, now_s - rank.heard_s
    since = f"for {max(0, still_s):.1f} s; heard {max(0, silent_s):.1f} s ago"
    closed = "; its connection has closed" if rank.closed else ""
    at = f"; main thread at {rank.report.at}" if rank.report.at else ""
    return f"{describe_report(rank.report)} {since}{closed}{at}"


def describe_report(report: Report) -> str:
    """Describes where a rank is, by its own report."""
    traced = f" (traced last: {report.inside!r})" if report.inside else ""
    if report.completed < report.entered:
        return f"is inside collective {report.entered}{traced}"
    return f"is outside collectives, {report.completed} completed{traced},"


def describe_finished(waiting: int, what: str) -> str:
    """Explains why a finished rank will not join the collective another waits in."""
    return (
        "has no more data (finish, hvd.join) and takes part only in sums of gradients;"
        f" rank {waiting} has reached {what}, which needs all ranks"
    )


def _among(rank: Rank) -> int:
    """Returns what collectives have in common that a rank can be in at once."""
    return rank.report.among or rank.report.number


def _progress(report: Report) -> tuple[int, int, int]:
    return report.entered, report.completed, report.number


def describe_missing(
    missing: Mapping[int, str], tasks: Sequence[str], *, own: int
) -> str:
    """Returns a sentence that names the missing ranks and their faults."""
    faults = _list_faults(missing, tasks)
    return f"rank {own} of {len(tasks)} cannot continue: {faults}"


def describe_slow(
    slow: Mapping[int, str], tasks: Sequence[str], *, own: int, limit_s: float
) -> str:
    """Returns a warning about ranks that report, but hold the others up."""
    return (
        f"rank {own} of {len(tasks)} reports a stall: {_list_faults(slow, tasks)}. "
        f"Ranks wait up to {limit_s:g} s for a rank that answers."
    )


def _list_faults(faults: Mapping[int, str], tasks: Sequence[str]) -> str:
    return "; ".join(
        f"rank {rank} ({tasks[rank]}) {faults[rank]}" for rank in sorted(faults)
    )

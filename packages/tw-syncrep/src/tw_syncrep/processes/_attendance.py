"""Who is missing: what rank 0 concludes from what it has heard of each rank.

Rank 0 hears of every rank a few times a second how many collectives it has entered.
A rank is missing where its connection closed although it had not said goodbye, where it
has been silent for the deadline, or where it stays behind: others have entered a
collective that it has not entered for the deadline. Before its first collective, and
while it traces, a rank has longer, since tracing a model can take minutes. Where all
have entered a collective and some do not get out of it, a connection between them is
lost.

Who is gone holds others up, some of them inside a collective that the rest has got out
of. So nobody is said to stay behind while it is inside one, or while somebody is gone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Deadlines:
    """How long ranks wait.

    Attributes:
      timeout_s: for a silent rank, and for one that stays behind.
      first_timeout_s: for one that stays behind with its first collective, or with one
        that it has just traced.
    """

    timeout_s: float
    first_timeout_s: float


@dataclass(frozen=True)
class Report:
    """What a rank says of itself.

    Attributes:
      entered: how many collectives it has entered.
      completed: how many of them it has got out of.
      traced: how many it had entered when it last traced one.
      inside: name of the collective that it traced last.
    """

    entered: int = 0
    completed: int = 0
    traced: int = 0
    inside: str = ""


@dataclass
class Rank:
    """What rank 0 knows of one rank.

    Attributes:
      heard_s: when it was heard last.
      report: what it said then.
      behind_s: since when others have been ahead of it; None while none is.
      moved_s: when it was heard last to have entered or completed a collective.
      closed: whether its connection has closed.
      left: whether it had said goodbye.
    """

    heard_s: float
    report: Report = field(default_factory=Report)
    behind_s: float | None = None
    moved_s: float = 0.0
    closed: bool = False
    left: bool = False


class Attendance:
    """What rank 0 has heard of every rank; times in seconds of one clock."""

    def __init__(self, size: int, deadlines: Deadlines, now_s: float) -> None:
        """Has heard of each of ``size`` ranks at ``now_s``."""
        self.ranks = [Rank(now_s, moved_s=now_s) for _ in range(size)]
        self.deadlines = deadlines

    def hear(self, rank: int, report: Report, now_s: float) -> None:
        """Notes what a rank says of itself."""
        speaker = self.ranks[rank]
        if report.entered != speaker.report.entered:
            speaker.behind_s = None
        if _progress(report) != _progress(speaker.report):
            speaker.moved_s = now_s
        speaker.heard_s, speaker.report = now_s, report
        front = max(other.report.entered for other in self.ranks)
        for other in self.ranks:
            if other.report.entered >= front:
                other.behind_s = None
            elif other.behind_s is None:
                other.behind_s = now_s

    def leave(self, rank: int) -> None:
        """Notes that a rank has said goodbye."""
        self.ranks[rank].left = True

    def close(self, rank: int) -> None:
        """Notes that a rank's connection has closed."""
        self.ranks[rank].closed = True

    def find_missing(self, now_s: float) -> dict[int, str]:
        """Returns what is wrong with each rank that is missing, by rank."""
        for find_fault in (self._find_end, self._find_delay):
            found = {
                number: fault
                for number, rank in enumerate(self.ranks)
                if (fault := find_fault(rank, now_s))
            }
            if found:
                return found
        return self._find_stuck(now_s)

    def describe(self, now_s: float) -> dict[int, str]:
        """Returns what each rank is inside of, by rank."""
        return {number: _tell(rank, now_s) for number, rank in enumerate(self.ranks)}

    def find_arrived(self) -> list[int]:
        """Returns who has entered the last collective that anyone has."""
        front = max(rank.report.entered for rank in self.ranks)
        here = enumerate(self.ranks)
        return [number for number, rank in here if rank.report.entered == front]

    def find_unheard(self, since_s: float) -> list[int]:
        """Returns who has neither said anything since then, nor goodbye."""
        return [
            number
            for number, rank in enumerate(self.ranks)
            if rank.heard_s < since_s and not rank.left
        ]

    def _find_stuck(self, now_s: float) -> dict[int, str]:
        """Finds who does not get out of a collective that all have entered."""
        all_entered = min(rank.report.entered for rank in self.ranks)
        still_s = now_s - max(rank.moved_s for rank in self.ranks)
        if still_s < self.deadlines.timeout_s:
            return {}
        fault = (
            f"has been inside collective {all_entered} for {still_s:.1f} s, which all "
            "have entered: a connection between ranks is lost or slow"
        )
        return {
            number: fault
            for number, rank in enumerate(self.ranks)
            if rank.report.completed < all_entered
        }

    def _find_end(self, rank: Rank, now_s: float) -> str:
        """Tells why a rank does not answer any more."""
        if rank.left:
            is_awaited = rank.behind_s is not None
            return "has ended, and others wait for it" if is_awaited else ""
        if rank.closed:
            return "has closed its connection: its process has ended"
        silent_s = now_s - rank.heard_s
        is_silent = silent_s >= self.deadlines.timeout_s
        return f"has been silent for {silent_s:.1f} s" if is_silent else ""

    def _find_delay(self, rank: Rank, now_s: float) -> str:
        """Tells for how long a rank has not come to a collective."""
        report, limits = rank.report, self.deadlines
        is_inside = report.completed < report.entered
        if rank.left or rank.behind_s is None or is_inside:
            return ""
        is_new = report.entered == 0 or report.entered == report.traced
        limit_s = limits.first_timeout_s if is_new else limits.timeout_s
        behind_s = now_s - rank.behind_s
        if behind_s < limit_s:
            return ""
        return (
            f"has not entered collective {report.entered + 1} for {behind_s:.1f} s, "
            "which others have"
        )


def _tell(rank: Rank, now_s: float) -> str:
    """Tells what a rank is inside of, and since when."""
    if rank.left:
        return f"has left after {rank.report.completed} collectives"
    since = f"for {now_s - rank.moved_s:.1f} s; heard {now_s - rank.heard_s:.1f} s ago"
    closed = "; its connection has closed" if rank.closed else ""
    return f"{describe_report(rank.report)} {since}{closed}"


def describe_report(report: Report) -> str:
    """Tells what a rank is inside of, by what it says of itself."""
    traced = f" (traced last: {report.inside!r})" if report.inside else ""
    if report.completed < report.entered:
        return f"is inside collective {report.entered}{traced}"
    return f"is outside, {report.completed} collectives completed{traced},"


def _progress(report: Report) -> tuple[int, int]:
    return report.entered, report.completed


def describe_missing(
    missing: Mapping[int, str], tasks: Sequence[str], *, own: int
) -> str:
    """Returns one sentence on who is missing, and why.

    Args:
      missing: what is wrong, by rank.
      tasks: "host:port, process 123" of every rank.
      own: the rank that says so.
    """
    faults = "; ".join(
        f"rank {rank} ({tasks[rank]}) {missing[rank]}" for rank in sorted(missing)
    )
    return f"rank {own} of {len(tasks)} goes on without an answer from others: {faults}"

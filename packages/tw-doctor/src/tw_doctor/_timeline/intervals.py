"""The contents of a recorded step: operations with their devices, parts and times.

Plain data, independent of the recorder. Times are seconds on the clock of the task that
recorded; the first recorded step begins near 0.
"""

from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Interval:
    """One execution of an operation.

    Attributes:
      device: canonical device string; ``""`` if it is not known.
      part: its purpose: ``"forward"``, ``"backward"``, ``"reduce"``, ``"apply"``,
        ``"move"``, ``"input"`` or ``"other"``.
      tower: index of the tower in its name, or None.
      name: the operation's name.
      kind: its type, e.g. ``"MatMul"``.
      start: seconds.
      end: seconds.
      num_bytes: memory allocated for its results; None if not recorded.
    """

    device: str
    part: str
    tower: int | None
    name: str
    kind: str
    start: float
    end: float
    num_bytes: int | None = None


@dataclass(frozen=True)
class Arrival:
    """A tensor that a device received from another.

    Attributes:
      device: the receiver.
      source: the sender; ``""`` if it is not known.
      name: the operation that made it.
      sent: seconds; when it was ready to be fetched.
      time: seconds; when it had arrived.
      num_bytes: its size; None if not recorded.
    """

    device: str
    source: str
    name: str
    sent: float
    time: float
    num_bytes: int | None = None


@dataclass(frozen=True)
class Call:
    """An activity of the program itself, on the thread that called the step.

    Attributes:
      name: the activity.
      start: seconds.
      end: seconds.
    """

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RecordedStep:
    """One step, from the end of the step before.

    Attributes:
      number: index of the program's step, from 0, in a block with marks; without marks,
        index of the recorded call.
      begin: seconds; the end of the step before, or ``start`` if that was not recorded.
        Time between ``begin`` and ``start`` is the program's own, such as for input.
      start: seconds; when the step was called.
      end: seconds; when the call had returned.
      intervals: by start.
      arrivals: by time.
      calls: of the calling thread, by start.
    """

    number: int
    begin: float
    start: float
    end: float
    intervals: tuple[Interval, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    calls: tuple[Call, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """The step's wall time, including the time before its call."""
        return self.end - self.begin

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices that are known to have done something, sorted."""
        found = {own.device for own in self.intervals if own.device}
        return tuple(sorted(found, key=lambda device: (len(device), device)))

    @cached_property
    def last_device(self) -> str:
        """The device whose work ends last; ``""`` if none is known."""
        known = [own for own in self.intervals if own.device]
        return max(known, key=lambda own: own.end).device if known else ""

    def on(self, device: str) -> list[Interval]:
        """The intervals of one device, by start."""
        return [own for own in self.intervals if own.device == device]


Span = tuple[float, float]


def union(spans: list[Span]) -> list[Span]:
    """Joins spans that touch or overlap; sorted."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(spans: list[Span]) -> float:
    """The seconds that spans cover in total."""
    return sum(end - start for start, end in union(spans))


def clipped(spans: list[Span], within: Span) -> list[Span]:
    """The parts of spans inside of ``within``; none of them empty."""
    inside = [(max(start, within[0]), min(end, within[1])) for start, end in spans]
    return [(start, end) for start, end in inside if end > start]


def gaps(spans: list[Span], within: Span) -> list[Span]:
    """The parts of ``within`` that no span covers; sorted, none of them empty."""
    free: list[Span] = []
    at, last = within
    for start, end in union(spans):
        if start > at:
            free.append((at, min(start, last)))
        at = max(at, end)
    if at < last:
        free.append((at, last))
    return [(start, end) for start, end in free if end > start]

"""The table of recorded steps: which part of which device took how long."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from tw_doctor._timeline.intervals import RecordedStep, Span, length
from tw_doctor._timeline.parts import PARTS
from tw_doctor._timeline.waits import explained, short_device, waits

WAIT = "wait"
_SHOWN = 0.001  # of a step's time: shorter rows are left out of the printed table
_Key = tuple[str, str, int | None, str]  # part, device, tower, reason of a wait
_ORDER = {part: index for index, part in enumerate((*PARTS, WAIT))}


@dataclass(frozen=True)
class Row:
    """A device's work for one part, averaged over the recorded steps.

    Attributes:
      part: one of ``input``, ``forward``, ``backward``, ``reduce``, ``apply``,
        ``move``, ``other``, or ``wait``.
      device: canonical device string.
      tower: index of the tower in the operations' names, or None.
      ms: milliseconds per step; time in which operations overlap counts once.
      share: of the step's wall time. Parts of a device can run at the same time, so
        that shares may add up to more than 1.
      num_bytes: made by the operations, or arrived, per step; None if unknown.
      waits_for: the reason of a wait; ``""`` if it is not known.
    """

    part: str
    device: str
    tower: int | None
    ms: float
    share: float
    num_bytes: int | None = None
    waits_for: str = ""


@dataclass(frozen=True)
class Summary:
    """Where the time of recorded steps went; ``str`` of it is a table.

    Attributes:
      rows: by device and part.
      num_steps: how many steps were recorded.
      ms: median wall time of a step, milliseconds.
      explained: share of wall time with a known cause, in the step where it is lowest.
      cost: time that recording added to a step, as a share; None if not measured.
      note: how the steps were chosen, if they were sampled, and what reducers with
        memory send; else ``""``.
    """

    rows: tuple[Row, ...]
    num_steps: int
    ms: float
    explained: float
    cost: float | None = None
    note: str = ""

    def __str__(self) -> str:
        """A line per row of 0.1 % and more, then the number and length of steps."""
        head = ("part", "device", "tower", "ms", "share", "bytes", "waits for")
        lines = [
            (
                row.part,
                short_device(row.device) or "?",
                "" if row.tower is None else str(row.tower),
                f"{row.ms:.3f}",
                f"{row.share:.1%}",
                "" if row.num_bytes is None else f"{row.num_bytes:,}",
                row.waits_for or ("?" if row.part == WAIT else ""),
            )
            for row in self.rows
            if row.share >= _SHOWN or row.num_bytes
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        to_right = (3, 4, 5)
        table = [
            "  ".join(
                cell.rjust(width) if n in to_right else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (head, tuple("-" * width for width in widths), *lines)
        ]
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        told = f"{steps} of {self.ms:.2f} ms; {self.explained:.1%} explained"
        if self.cost is not None:
            told += f"; recording added {self.cost:.1%}"
        return "\n".join([*table, told + ".", *filter(None, [self.note])])


def summarize(
    steps: Sequence[RecordedStep], *, cost: float | None = None, note: str = ""
) -> Summary:
    """Adds up recorded steps, of which there must be at least one."""
    seconds: dict[_Key, float] = defaultdict(float)
    sizes: dict[_Key, int] = {}
    for step in steps:
        spans: dict[_Key, list[Span]] = defaultdict(list)
        for key, span, num_bytes in _spent(step):
            spans[key].append(span)
            if num_bytes is not None:
                sizes[key] = sizes.get(key, 0) + num_bytes
        for key, own in spans.items():
            seconds[key] += length(own)
    wall = sum(step.seconds for step in steps)
    rows = [
        Row(
            *key[:3],
            ms=1e3 * took / len(steps),
            share=took / wall,
            num_bytes=round(sizes[key] / len(steps)) if key in sizes else None,
            waits_for=key[3],
        )
        for key, took in seconds.items()
    ]
    rows.sort(key=_place)
    return Summary(
        tuple(rows),
        len(steps),
        1e3 * median(step.seconds for step in steps),
        min(map(explained, steps)),
        cost,
        note,
    )


def _spent(step: RecordedStep) -> Iterator[tuple[_Key, Span, int | None]]:
    """Yields everything a step's devices did, with its bytes if known."""
    for own in step.intervals:
        key = (own.part, own.device, own.tower, "")
        yield key, (own.start, own.end), own.num_bytes
    for device in step.devices:
        for wait in waits(step, device):
            yield (WAIT, device, None, wait.why), (wait.start, wait.end), None
    for one in step.arrivals:
        yield ("move", one.device, None, ""), (one.time, one.time), one.num_bytes


def _place(row: Row) -> tuple[object, ...]:
    tower = -1 if row.tower is None else row.tower
    order = _ORDER[row.part]
    return len(row.device), row.device, order, tower, -row.ms, row.waits_for

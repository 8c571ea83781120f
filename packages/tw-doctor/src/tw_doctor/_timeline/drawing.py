"""A picture of one step: a band per device, coloured by part, with its waits."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tw_doctor._timeline.intervals import Interval, RecordedStep, Span, length, union
from tw_doctor._timeline.parts import PARTS, cargo_of, producer_of
from tw_doctor._timeline.summary import WAIT
from tw_doctor._timeline.waits import short_device, waits

_Box = tuple[float, float, float, float]  # start, end, bottom, height: of a band of 1

# Neighbours differ in lightness, too: some readers do not see hues.
_COLORS = {
    "input": "#d17fb5",
    "forward": "#0b4f7d",
    "backward": "#7cc4ee",
    "reduce": "#d1432b",
    "apply": "#2c9163",
    "move": "#f2b705",
    "other": "#8a8a8a",
    WAIT: "#f0f0f0",
}
_BETWEEN, _CALL = "between steps: input, Python", "the step's call"
_PROGRAM = {_BETWEEN: "#6f3b94", _CALL: "#4a5568"}
_LEAST_SHOWN = 50_000  # bytes of one kind that a device receives from another
_LEAST_NOTED = 0.025  # of a step: a wait with room for the number of a note
# Spans shorter than 1 / _FINE of a step are drawn together, as shares of it.
_FINE = 1000
_HEIGHT = 0.55  # of a band; bands are 1 apart, with their text between
_SMALL = 8.5  # points
_WIDE, _BAND, _LINE = 8.4, 0.78, 0.17  # inches: the picture, a band, a line of text
_SIDE = 0.15  # inches, left and right
_COLUMN = 1.9  # inches: a column of the key
_DPI = 180
_PLAIN_KEY: dict[str, Any] = {
    "frameon": False,
    "borderpad": 0,
    "borderaxespad": 0,
    "handlelength": 1.2,
    "columnspacing": 1.6,
}


def draw_step(step: RecordedStep, path: str | Path, sent: Sequence[str] = ()) -> None:
    """Draws a step into a file, whose suffix selects the format.

    ``sent`` are sentences about what reducers send, below the notes.
    """
    figure_of(step, sent).savefig(path, dpi=_DPI)


def figure_of(step: RecordedStep, sent: Sequence[str] = (), wide: float = _WIDE) -> Any:
    """Draws a step into a figure of matplotlib's, ``wide`` inches wide."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "draw: drawing needs matplotlib, which is not installed: pip install "
            "matplotlib. The extra `draw` of tw-doctor installs it."
        ) from error
    devices = step.devices
    figure = Figure(dpi=_DPI)
    picture = _Picture(figure.subplots(), step, 72 * (wide - 2 * _SIDE))
    picture.draw_program(len(devices))
    for row, device in enumerate(devices):
        picture.draw_device(device, len(devices) - 1 - row)
    axes = picture.axes
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(devices) + 0.6)
    axes.set_xlim(0, 1e3 * step.seconds)
    axes.set_xlabel("ms since the step before ended", fontsize=_SMALL)
    axes.tick_params(labelsize=_SMALL)
    axes.spines[["top", "right", "left"]].set_visible(False)
    notes = [f"{n}: {text}" for n, text in enumerate(picture.notes, 1)]
    _lay_out(figure, axes, step, wide, [*notes, *sent])
    return figure


def _lay_out(
    figure: Any, axes: Any, step: RecordedStep, wide: float, notes: list[str]
) -> None:
    """Gives the bands their size, with title and key above and notes below."""
    handles = _key(step)
    columns = int(wide / _COLUMN)
    above = 0.46 + _LINE * max(2, -(-len(handles) // columns))
    below = 0.5 + _LINE * len(notes)
    bands = len(step.devices) + 1
    tall = above + _BAND * (bands + 0.1) + below
    figure.set_size_inches(wide, tall)
    left, width = _SIDE / wide, 1 - 2 * _SIDE / wide
    axes.set_position((left, below / tall, width, 1 - (above + below) / tall))
    title = f"One step, {1e3 * step.seconds:.2f} ms"
    figure.text(left, 1 - 0.1 / tall, title, va="top", fontsize=12)
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 1 - 0.33 / tall),
        ncols=columns,
        fontsize=_SMALL,
        **_PLAIN_KEY,
    )
    low = 0.06 / tall
    lines = "\n".join(notes)
    figure.text(left, low, lines, va="bottom", fontsize=_SMALL, linespacing=1.3)


class _Picture:
    """Draws into a picture's bands.

    ``notes`` are the texts of waits too narrow for them, by number from 1.
    """

    def __init__(self, axes: Any, step: RecordedStep, room: float) -> None:
        self.axes, self._step, self._room = axes, step, room  # in points
        self.notes: list[str] = []

    def draw_device(self, device: str, row: int) -> None:
        """Draws a band: coloured where the device is busy, by its parts."""
        step = self._step
        own = step.on(device)
        for wait in waits(step, device):
            self._label(wait.why or "unknown", (wait.start, wait.end), row)
        self._bars(_COLORS[WAIT], [(step.begin, step.end, 0.0, 1.0)], row)
        spans = {
            part: union([(o.start, o.end) for o in own if o.part == part])
            for part in PARTS
        }
        boxes: dict[str, list[_Box]] = defaultdict(list)
        for part, box in _boxes(spans, step.begin, step.seconds / _FINE):
            boxes[part].append(box)
        for part, places in boxes.items():
            self._bars(_COLORS[part], places, row)
        towers = _towers_on(own)
        for one in own:
            if one.tower is not None and len(towers) > 1 and one.part != "move":
                span = (one.start, one.end)
                self._label(f"tower {one.tower}", span, row, noted=False)
        told = "".join(f"tower {tower}, " for tower in towers)
        busy = length([(one.start, one.end) for one in own]) / step.seconds
        head = f"{short_device(device)}: {told}{busy:.0%} busy"
        for source, cargo in _taken(step, device).items():
            facts = [
                f"takes {', '.join(cargo[:most])} from {source}"
                for most in range(len(cargo), 0, -1)
            ]
            line = head.splitlines()[-1]
            fitting = [own for own in facts if _width(own) <= self._room]
            if _width(f"{line}; {facts[0]}") <= self._room:
                head += f"; {facts[0]}"
            elif line == head and fitting:
                head += f";\n{fitting[0]}"
        self._head(head, row)

    def draw_program(self, row: int) -> None:
        """Draws the step's call, and the time before it."""
        step = self._step
        self._head("program", row)
        for told, span in (
            (_BETWEEN, (step.begin, step.start)),
            (_CALL, (step.start, step.end)),
        ):
            if span[1] > span[0]:
                self._bars(_PROGRAM[told], [(*span, 0.0, 1.0)], row)
                self._label(told, span, row, color="white", noted=False)

    def _head(self, text: str, row: int) -> None:
        """Writes a line above a band."""
        high = row + _HEIGHT / 2 + 0.06
        style = {"va": "bottom", "fontsize": _SMALL, "linespacing": 1.0}
        self.axes.text(0, high, text, **style)

    def _bars(self, color: str, boxes: list[_Box], row: int) -> None:
        from matplotlib.collections import PolyCollection

        style: dict[str, Any] = {"facecolor": color, "linewidth": 0}
        if color == _COLORS[WAIT]:
            style |= {"hatch": "////", "edgecolor": "#d4d4d4"}
        shapes = []
        for start, end, bottom, height in boxes:
            left, right = (1e3 * (time - self._step.begin) for time in (start, end))
            low = row + _HEIGHT * (bottom - 0.5)
            high = low + _HEIGHT * height
            shapes.append([(left, low), (left, high), (right, high), (right, low)])
        self.axes.add_collection(PolyCollection(shapes, **style))

    def _label(
        self,
        text: str,
        span: Span,
        row: int,
        *,
        color: str = "#333333",
        noted: bool = True,
    ) -> None:
        """Writes a text into a bar that has room for it, or else a note's number."""
        share = (span[1] - span[0]) / self._step.seconds
        if share < _LEAST_NOTED:  # most are, and measuring a text is slow
            return
        if _width(text) > share * self._room - 4:
            if not noted:
                return
            if text not in self.notes:
                self.notes.append(text)
            text = str(self.notes.index(text) + 1)
        middle = 1e3 * (sum(span) / 2 - self._step.begin)
        style = {"ha": "center", "va": "center", "fontsize": _SMALL, "color": color}
        self.axes.text(middle, row, text, **style)


def _width(text: str) -> float:
    """Measures a text, in points."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size=_SMALL).get_extents().width)


def _boxes(
    spans: Mapping[str, list[Span]], begin: float, fine: float
) -> Iterator[tuple[str, _Box]]:
    """Yields boxes with their parts, whose area is the time that the parts take.

    Parts that run at once are above each other. Stretches too short to tell apart in a
    picture are added up in slots of ``fine`` seconds, whose height they fill in part.
    """
    slots: dict[int, dict[str, float]] = defaultdict(partial(defaultdict, float))
    for start, end, at_once in _stretches(spans):
        share = 1 / len(at_once)
        if end - start >= fine:
            for place, part in enumerate(at_once):
                yield part, (start, end, place * share, share)
            continue
        slot = int((start - begin) / fine)
        edge = min(end, begin + (slot + 1) * fine)  # where the next slot may begin
        for part in at_once:
            slots[slot][part] += (edge - start) * share / fine
            slots[slot + 1][part] += (end - edge) * share / fine
    for slot, shares in slots.items():
        bottom, start = 0.0, begin + slot * fine
        for part in PARTS:
            if shares[part]:
                yield part, (start, start + fine, bottom, shares[part])
                bottom += shares[part]


def _stretches(
    spans: Mapping[str, list[Span]],
) -> Iterator[tuple[float, float, list[str]]]:
    """Cuts time where a part begins or ends; yields the parts of each stretch."""
    changes = sorted(
        change
        for part, each in spans.items()
        for start, end in each
        if end > start
        for change in ((start, True, part), (end, False, part))
    )
    active: set[str] = set()
    for (time, begins, part), (following, _, _) in pairwise([*changes, *changes[-1:]]):
        (active.add if begins else active.discard)(part)
        if active and following > time:
            yield time, following, [own for own in PARTS if own in active]


def _towers_on(own: list[Interval]) -> list[int]:
    """Towers with a tenth or more of the time that towers compute on a device."""
    seconds: dict[int, float] = {}
    for one in own:
        if one.tower is not None:
            took = one.end - one.start
            seconds[one.tower] = seconds.get(one.tower, 0.0) + took
    least = 0.1 * sum(seconds.values())
    return sorted(tower for tower, took in seconds.items() if took >= least)


def _taken(step: RecordedStep, device: str) -> dict[str, list[str]]:
    """Source -> the largest transfers from it to a device, three over all sources."""
    sizes: Counter[tuple[str, str]] = Counter()
    for arrival in step.arrivals:
        if arrival.device == device and arrival.num_bytes and arrival.source:
            cargo = cargo_of(producer_of(arrival.name))
            sizes[cargo, short_device(arrival.source)] += arrival.num_bytes
    taken: dict[str, list[str]] = {}
    for (cargo, source), size in sizes.most_common(3):
        if size >= _LEAST_SHOWN:
            taken.setdefault(source, []).append(f"{size / 1e6:.1f} MB {cargo}")
    return taken


def _key(step: RecordedStep) -> list[Any]:
    """Names every colour, and counts operations: small ones cost by their number."""
    from matplotlib.patches import Patch

    counts = Counter(one.part for one in step.intervals)
    handles = [Patch(color=color, label=told) for told, color in _PROGRAM.items()]
    handles += [
        Patch(color=_COLORS[part], label=f"{part} ({n:,} op{'s' * (n != 1)})")
        for part in PARTS
        if (n := counts[part])
    ]
    hatched = Patch(facecolor=_COLORS[WAIT], hatch="////", edgecolor="#bbbbbb")
    hatched.set_label("waits")
    return [*handles, hatched]

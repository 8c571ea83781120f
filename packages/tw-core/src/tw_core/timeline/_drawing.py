"""A picture of one step: a band per device, coloured by part, with its waits."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tw_core.timeline._intervals import Interval, RecordedStep, Span, length, union
from tw_core.timeline._parts import PARTS, cargo_of, producer_of
from tw_core.timeline._summary import WAIT
from tw_core.timeline._waits import short_device, waits

_COLORS = {
    "input": "#8a5a9e",
    "forward": "#2a6f97",
    "backward": "#61a5c2",
    "reduce": "#c8553d",
    "apply": "#588157",
    "move": "#e0a458",
    "other": "#8d99ae",
    WAIT: "#f0f0f0",
}
_LEAST_SHOWN = 50_000  # bytes that a device takes of one kind from another
_WIDTH = 1500  # spans shorter than 1 / _WIDTH of a step are drawn that long
_HEIGHT = 0.8  # of a band; bands are 1 apart


def draw_step(step: RecordedStep, path: str | Path) -> None:
    """Draws a step into a file, whose suffix selects the format."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "draw: drawing needs matplotlib, which is not installed: pip install "
            "matplotlib. The extra `draw` of tw-core brings it."
        ) from error
    devices = step.devices
    figure = Figure(figsize=(12, 1.9 + 0.95 * len(devices)), layout="constrained")
    picture = _Picture(figure.subplots(), step)
    for row, device in enumerate(devices):
        picture.draw_device(device, len(devices) - 1 - row)
    picture.draw_program(len(devices))
    axes = picture.axes
    axes.set_yticks(
        range(len(devices) + 1),
        [*map(short_device, reversed(devices)), "program"],
    )
    axes.set_ylim(-0.6, len(devices) + 0.6)
    axes.set_xlim(0, 1e3 * step.seconds)
    axes.set_xlabel("ms since the step before ended")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"One step, {1e3 * step.seconds:.2f} ms", loc="left")
    _draw_legend(axes, step)
    figure.savefig(path, dpi=130)


class _Picture:
    """Draws into a picture's bands."""

    def __init__(self, axes: Any, step: RecordedStep) -> None:
        self.axes, self._step = axes, step

    def draw_device(self, device: str, row: int) -> None:
        """Draws parts that run at once above each other, each in its slice."""
        step = self._step
        own = step.on(device)
        fine = step.seconds / _WIDTH
        bars: dict[tuple[str, float, float], list[Span]] = defaultdict(list)
        for wait in waits(step, device):
            if wait.end - wait.start >= fine:
                bars[WAIT, 0.0, 1.0].append((wait.start, wait.end))
                self._label(wait.why or "?", (wait.start, wait.end), row)
        spans = {
            part: _merged([(o.start, o.end) for o in own if o.part == part], fine)
            for part in PARTS
        }
        for start, end, at_once in _stretches(spans):
            for slot, part in enumerate(at_once):
                share = 1 / len(at_once)
                bars[part, slot * share, share].append((start, end))
        for (part, bottom, height), places in bars.items():
            low = row + _HEIGHT * (bottom - 0.5)
            self._bars(part, places, low, _HEIGHT * height)
        towers = _towers_on(own)
        for one in own:
            if one.tower is not None and len(towers) > 1 and one.part != "move":
                self._label(f"tower {one.tower}", (one.start, one.end), row)
        told = ", ".join(f"tower {tower}" for tower in towers)
        busy = length([(one.start, one.end) for one in own]) / step.seconds
        lines = [f"{told + ', ' if told else ''}{busy:.0%} busy", *_taken(step, device)]
        self.axes.text(
            *(1.01, row, "\n".join(lines)),
            transform=self.axes.get_yaxis_transform(),
            **{"va": "center", "fontsize": 8, "color": "#555555"},
        )

    def draw_program(self, row: int) -> None:
        """Draws the step's call, and the time before it."""
        step = self._step
        for part, told, span in (
            ("input", "between steps: input, Python", (step.begin, step.start)),
            ("other", "the step's call", (step.start, step.end)),
        ):
            if span[1] > span[0]:
                self._bars(part, [span], row - 0.25, 0.5)
                self._label(told, span, row, color="white")

    def _bars(self, part: str, places: list[Span], low: float, height: float) -> None:
        style: dict[str, Any] = {"facecolor": _COLORS[part], "linewidth": 0}
        if part == WAIT:
            style |= {"hatch": "////", "edgecolor": "#d4d4d4"}
        boxes = [(1e3 * (a - self._step.begin), 1e3 * (b - a)) for a, b in places]
        self.axes.broken_barh(boxes, (low, height), **style)

    def _label(self, text: str, span: Span, row: int, color: str = "#333333") -> None:
        """Writes a text into a bar if it is wide enough."""
        start, end = span
        share = (end - start) / self._step.seconds
        room = int(share * 150)  # letters of this size over the width of the picture
        if room < 6:
            return
        if len(text) > room:
            text = text[: room - 1] + "…"
        middle = 1e3 * ((start + end) / 2 - self._step.begin)
        style = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
        self.axes.text(middle, row, text, **style)


def _merged(spans: list[Span], fine: float) -> list[Span]:
    """Joins spans too close to tell apart in a picture, and widens too short ones."""
    wide = union([(start, max(end, start + fine)) for start, end in spans])
    return [(start, end) for start, end in wide if end > start]


def _stretches(
    spans: Mapping[str, list[Span]],
) -> Iterator[tuple[float, float, list[str]]]:
    """Cuts time where a part begins or ends; yields the parts of each stretch."""
    changes = sorted(
        change
        for part, each in spans.items()
        for start, end in each
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


def _taken(step: RecordedStep, device: str) -> list[str]:
    """Describes what a device takes from others: a line for each of the top three."""
    sizes: Counter[tuple[str, str]] = Counter()
    for arrival in step.arrivals:
        if arrival.device == device and arrival.num_bytes and arrival.source:
            cargo = cargo_of(producer_of(arrival.name))
            sizes[cargo, short_device(arrival.source)] += arrival.num_bytes
    return [
        f"takes {size / 1e6:.1f} MB {cargo} of {source}"
        for (cargo, source), size in sizes.most_common(3)
        if size >= _LEAST_SHOWN
    ]


def _draw_legend(axes: Any, step: RecordedStep) -> None:
    """Adds a legend with operation counts: many small ones cost by their number."""
    from matplotlib.patches import Patch

    counts = Counter(one.part for one in step.intervals)
    handles = [
        Patch(color=_COLORS[part], label=f"{part} ({counts[part]})")
        for part in PARTS
        if counts[part]
    ]
    handles.append(
        Patch(facecolor=_COLORS[WAIT], hatch="////", edgecolor="#bbbbbb", label="waits")
    )
    axes.legend(
        handles=handles,
        **{"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(handles)},
        **{"frameon": False, "fontsize": 8, "handlelength": 1.2, "columnspacing": 1.2},
        title="operations of each part",
        title_fontsize=8,
    )

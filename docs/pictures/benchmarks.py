"""Draws ``benchmarks.png`` from the first table of ``docs/benchmarks.md``.

python docs/pictures/benchmarks.py
"""

import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

HERE = Path(__file__).parent
PAGE = HERE.parent / "benchmarks.md"
OURS, THEIRS, TARGET = "#2a6f97", "#e0a458", "#333333"
_ROW = re.compile(
    r"^\| (?P<work>[^|]+) \| (?P<against>[^|]+) \| (?P<ratio>[\d.]+)(?: \(missed\))? "
    r"\| (?P<at_most>[\d.]*) ?\|$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Row:
    """A line of the table; ``at_most`` is None where no target was set."""

    work: str
    against: str
    ratio: float
    at_most: float | None


def read_rows(page: str) -> list[Row]:
    """Reads the page's first table."""
    table = page.partition("| time ours / theirs |")[2].partition("\n\n")[0]
    return [
        Row(
            found["work"].replace("`", ""),
            found["against"].replace("`", ""),
            float(found["ratio"]),
            float(found["at_most"]) if found["at_most"] else None,
        )
        for found in _ROW.finditer(table)
    ]


def draw(rows: list[Row], path: Path) -> None:
    """Draws two bars a row, ours and theirs, and the target as a line."""
    figure, axes = plt.subplots(figsize=(8.4, 0.8 + 0.42 * len(rows)))
    for place, row in enumerate(rows):
        axes.barh(place - 0.2, row.ratio, 0.36, color=OURS)
        axes.barh(place + 0.2, 1.0, 0.36, color=THEIRS)
        axes.text(0.01, place - 0.2, f"{row.ratio:.2f}", va="center", color="white")
        axes.text(0.01, place + 0.2, row.against, va="center")
        if row.at_most is not None:
            axes.plot([row.at_most] * 2, [place - 0.42, place + 0.02], color=TARGET)
    axes.set_yticks(range(len(rows)), [row.work for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.35)
    axes.set_xlabel("time / time of theirs: shorter is better")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(color=OURS, label="ours"),
        Patch(color=THEIRS, label="theirs, by name"),
        plt.Line2D([], [], color=TARGET, label="target: at most"),
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False)
    figure.savefig(path, dpi=180)
    plt.close(figure)


if __name__ == "__main__":
    plt.rcParams.update({"font.size": 8.5, "figure.constrained_layout.use": True})
    draw(read_rows(PAGE.read_text("utf-8")), HERE / "benchmarks.png")

"""Draws ``benchmarks.svg`` from the first table of ``docs/benchmarks.md``.

python docs/pictures/benchmarks.py
"""

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "benchmarks.md"
LEFT, RIGHT, MOST = 14, 386, 1.3  # the ends of a row's line, and the ratio at its right
ABOVE, ROW, BELOW = 96, 47, 12  # heights, in pixels at the width of a phone
MISSED = " (missed)"
_STYLE = """\
    text { font: 12.5px system-ui, sans-serif; fill: #1c2733; }
    text { stroke: #f6f8fa; stroke-width: 3px; paint-order: stroke; }
    .small { font-size: 11.5px; }
    .head { font-size: 14px; font-weight: 600; }
    .number { font-weight: 600; text-anchor: end; }
    .end { text-anchor: end; }
    .mid { text-anchor: middle; }
    .ground { fill: #f6f8fa; }
    .line { stroke: #b6c2ce; stroke-width: 2; }
    .one { stroke: #6b7b8b; stroke-width: 1.5; stroke-dasharray: 2 3; }
    .target { stroke: #1c2733; stroke-width: 2.5; }
    .dot { fill: #1f6f9f; }
    .missed { fill: #f6f8fa; stroke: #b3400e; stroke-width: 3; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e8edf2; stroke: #1b2229; }
      .ground { fill: #1b2229; }
      .line { stroke: #4d5a67; }
      .one { stroke: #8d9aa7; }
      .target { stroke: #e8edf2; }
      .dot { fill: #6db7e4; }
      .missed { fill: #1b2229; stroke: #ff9a5c; }
    }
"""
_ROW = re.compile(
    r"^\| (?P<work>[^|]+) \| (?P<against>[^|]+) \| (?P<ratio>[\d.]+)"
    r"(?P<missed> \(missed\))? \| (?P<at_most>[\d.]*) ?\|$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Row:
    """A line of the table; ``at_most`` is None where no target was set."""

    work: str
    against: str
    ratio: float
    at_most: float | None
    missed: bool


def read_rows(page: str) -> list[Row]:
    """Reads the page's first table, the lowest ratio first."""
    table = page.partition("\n| work | against |")[2].partition("\n\n")[0]
    rows = [
        Row(
            found["work"].replace("`", ""),
            found["against"].replace("`", ""),
            float(found["ratio"]),
            float(found["at_most"]) if found["at_most"] else None,
            bool(found["missed"]),
        )
        for found in _ROW.finditer(table)
    ]
    return sorted(rows, key=lambda row: row.ratio)


def draw(rows: list[Row], path: Path) -> None:
    """Draws a row for each work: a dot on a line on which 1 is marked."""
    tall = ABOVE + ROW * len(rows) + BELOW
    bottom = tall - BELOW
    shapes = [
        f'<rect class="ground" width="400" height="{tall}" rx="8"/>',
        _text("head", LEFT, 26, "Our time / their time, on two CPU cores"),
        _text("small", LEFT, 44, "left of 1, ours takes less time"),
        '<circle class="dot" cx="20" cy="61" r="5"/>',
        _text("small", 31, 65, "target reached, or none set"),
        '<circle class="missed" cx="203" cy="61" r="4.5"/>',
        _text("small", 214, 65, "target missed"),
        '<path class="target" d="M311 54 V68"/>',
        _text("small", 319, 65, "target"),
        _text("small mid", _place(1), 88, "1"),
        f'<path class="one" d="M{_place(1)} 92 V{bottom}"/>',
    ]
    for number, row in enumerate(rows):
        shapes += _draw_row(row, ABOVE + ROW * number)
    path.write_text(_document(shapes, rows, tall), encoding="utf-8")


def _draw_row(row: Row, top: int) -> list[str]:
    """Draws the names of a work and of its peer, and the dot and the target below."""
    line, dot = top + 37, _place(row.ratio)
    shapes = [
        _text("", LEFT, top + 14, row.work),
        _text("number", RIGHT, top + 14, f"{row.ratio:.2f}"),
        _text("small", LEFT, top + 28, f"against {row.against}"),
        f'<path class="line" d="M{LEFT} {line} H{RIGHT}"/>',
    ]
    if row.at_most is not None:
        target = _place(row.at_most)
        shapes.append(f'<path class="target" d="M{target} {line - 7} V{line + 7}"/>')
    if row.missed:
        shapes.append(
            _text("small end", RIGHT, top + 28, f"target missed: {row.at_most:g}")
        )
    circle = 'class="missed" r="4.5"' if row.missed else 'class="dot" r="5"'
    return [*shapes, f'<circle {circle} cx="{dot}" cy="{line}"/>']


def _document(shapes: list[str], rows: list[Row], tall: int) -> str:
    named = "; ".join(f"{row.work}: {row.ratio:.2f}" for row in rows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 {tall}" '
            f'width="400" height="{tall}" role="img" aria-labelledby="title desc">',
            '  <title id="title">Our time / their time</title>',
            f'  <desc id="desc">{escape(named)}.</desc>',
            f"  <style>\n{_STYLE}  </style>",
            *(f"  {shape}" for shape in shapes),
            "</svg>\n",
        ]
    )


def _place(ratio: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * ratio / MOST, 1)


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


if __name__ == "__main__":
    draw(read_rows(PAGE.read_text("utf-8")), HERE / "benchmarks.svg")

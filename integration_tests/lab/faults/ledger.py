"""The ledger of trials: a line each, written as they end, and a table of them all.

It can be cut off anywhere and taken up again: a line that is not whole does not count.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

GOOD = "good"
SEPARATOR = "\t"


@dataclass(frozen=True)
class Line:
    """One trial."""

    drill: str  # its name
    verdict: str  # ``GOOD``, or what did not hold
    # Seconds beyond the deadline of the last error; None without one
    beyond_s: float | None
    longest_s: float | None  # seconds of the longest call; None where it is not known
    lost: int  # steps lost beyond what the documentation says
    code: str  # which version of the package was tried
    remarks: str  # what else there was to see

    @property
    def is_good(self) -> bool:
        return self.verdict == GOOD


class Ledger:
    """The lines of a file, or of this process alone."""

    def __init__(self, path: Path | None) -> None:
        """Reads the file, if there is one."""
        self._path = path
        self.lines = read(path) if path is not None and path.exists() else []
        if path is not None:
            # What a process that was killed has left of its last line ends here.
            with path.open("a+") as file:
                file.seek(0)
                text = file.read()
                if text and not text.endswith("\n"):
                    file.write("\n")

    def add(self, line: Line) -> None:
        """Appends a line, in one write."""
        self.lines.append(line)
        if self._path is not None:
            row = [_cell(value) for value in astuple(line)]
            with self._path.open("a") as file:
                file.write(SEPARATOR.join(row) + "\n")


def read(path: Path) -> list[Line]:
    """Returns the lines of a file that are whole."""
    width = len(fields(Line))
    lines = []
    for row in path.read_text().splitlines():
        cells = row.split(SEPARATOR)
        if len(cells) == width:
            name, verdict, beyond, longest, lost, *rest = cells
            numbers = [float(cell) if cell else None for cell in (beyond, longest)]
            lines.append(Line(name, verdict, *numbers, int(lost), *rest))
    return lines


def choose(
    names: Sequence[str],
    lines: Iterable[Line],
    under_way: Sequence[str],
    *,
    each: int | None,
    total: int | None,
) -> str | None:
    """Chooses the next drill: of those with the fewest trials, the first.

    Each drill is tried ``each`` times, all together ``total`` times (None: no limit);
    None where there are enough, those under way included.

    >>> choose(["a", "b", "c"], [], ["a"], each=1, total=None)
    'b'
    >>> choose(["a", "b"], [], ["a", "b"], each=None, total=2) is None
    True
    """
    counts = dict.fromkeys(names, 0)
    for name in [*(line.drill for line in lines), *under_way]:
        if name in counts:
            counts[name] += 1
    fewest = min(counts, key=lambda name: counts[name])
    is_enough = each is not None and counts[fewest] >= each
    is_enough |= total is not None and sum(counts.values()) >= total
    return None if is_enough else fewest


def summarize(
    lines: Sequence[Line],
    grid: Mapping[tuple[str, str], Mapping[str, str]],
    *,
    tells_lost: bool = True,
) -> str:
    """Returns Markdown: how many trials were good, and their seconds.

    In the grid are drills by column, by victim and fault; others have a row each.
    """
    columns = list(dict.fromkeys(after for row in grid.values() for after in row))
    columns = columns or ["trials"]
    table = [["victim", "fault", *columns, "steps lost"]]
    gridded = set()
    for (victim, fault), row in grid.items():
        gridded |= set(row.values())
        here = [line for line in lines if line.drill in row.values()]
        cells = [_told([x for x in here if x.drill == row.get(a)]) for a in columns]
        table.append([victim, fault, *cells, str(sum(line.lost for line in here))])
    others = [line for line in lines if line.drill not in gridded]
    for name in dict.fromkeys(line.drill for line in others):
        here = [line for line in others if line.drill == name]
        rest = ["" for _ in columns[1:]]
        table.append([name, "", _told(here), *rest, str(sum(x.lost for x in here))])
    if not tells_lost:
        table = [row[:-1] for row in table]
    table.insert(1, ["---"] * len(table[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def _told(lines: Sequence[Line]) -> str:
    """Tells how many were good, and the median and the most seconds.

    Where tasks raise, these are beyond the deadline; else of the longest call.
    """
    if not lines:
        return ""
    good = f"{sum(line.is_good for line in lines)} of {len(lines)}"
    beyond = [line.beyond_s for line in lines if line.beyond_s is not None]
    longest = [line.longest_s for line in lines if line.longest_s is not None]
    seconds, form = (beyond, "+.2f") if beyond else (longest, ".2f")
    if not seconds:
        return good
    middle, most = statistics.median(seconds), max(seconds)
    return f"{good}; {middle:{form}} / {most:{form}} s"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = "" if value is None else str(value)
    return " ".join(text.split())

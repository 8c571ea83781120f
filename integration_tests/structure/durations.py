"""How long tests take, as ``nox -s full -- --record`` has measured it.

``integration_tests/durations.txt`` has a line for each test of a second or more: that
of its slowest case, without what fixtures took. ``nox -s lint`` refuses a test that
takes the limit or longer and is not marked ``slow``, and a line whose test is gone.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path("integration_tests", "durations.txt")
LISTED_S = 1.0
LIMIT_S = 2.0
MARK = "pytest.mark.slow"
_ALL = "all cases of all tests"


def read(path: Path) -> dict[str, float]:
    """Reads seconds by test, and those of everything."""
    if not path.is_file():
        return {}
    rows = (line.split(maxsplit=1) for line in path.read_text("utf-8").splitlines())
    return {test: float(seconds) for seconds, test in rows}


def write(path: Path, seconds: Mapping[str, float]) -> None:
    """Replaces the lines of the tests that ran; a quick one needs none."""
    known = read(path) | {test: round(own, 1) for test, own in seconds.items()}
    rows = (f"{own:.1f} {test}" for test, own in known.items() if own >= LISTED_S)
    path.write_text("\n".join(sorted(rows, key=lambda row: row.split()[1])) + "\n")


def note_all(seconds: float, path: Path = ROOT / FILE) -> None:
    """Notes how long everything took."""
    write(path, {_ALL: seconds})


def find_slow(root: Path) -> Iterator[str]:
    """Finds tests above the limit that are not marked, and lines without a test."""
    for test, seconds in read(root / FILE).items():
        if test == _ALL:
            continue
        file, *names = test.split("::")
        marked = _is_marked(root / file, tuple(names))
        if marked is None:
            yield f"{FILE} names {test}, which is no more; take its line out."
        elif seconds >= LIMIT_S and not marked:
            yield (
                f"{test} takes {seconds} s ({FILE}): make it quicker, or mark it "
                f"{MARK}; by day run tests below {LIMIT_S:.0f} s."
            )


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


def _is_marked(file: Path, names: tuple[str, ...]) -> bool | None:
    """Returns whether a test, its class or its module has the mark; None: no test."""
    if not file.is_file():
        return None
    node: ast.Module | ast.ClassDef | ast.FunctionDef = _tree(file)
    marked = any(
        MARK in ast.unparse(one)
        for one in node.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark"
    )
    for name in names:
        found = [
            one
            for one in node.body
            if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name
        ]
        if not found:
            return None
        node = found[0]
        marked = marked or any(MARK in ast.unparse(one) for one in node.decorator_list)
    return marked


if __name__ == "__main__":
    note_all(float(sys.argv[1]))

"""Writes a package's row of the table of branches in docs/design/house.md.

The session ``coverage`` calls it: python -m structure.covered PACKAGE COVERAGE.json.
"""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from structure.tables import Row, merged, read_rows, write_rows

PAGE = Path(__file__).parents[2] / "docs" / "design" / "house.md"
COLUMNS = ("package", "statements", "run", "branches", "taken", "on")


def note(text: str, package: str, totals: dict[str, Any], day: str) -> str:
    """Returns the page with a package's row, from the totals of ``coverage json``."""
    row: Row = (package,)
    for every, some in (
        ("num_statements", "covered_lines"),
        ("num_branches", "covered_branches"),
    ):
        row += (f"{totals[every]:,}", f"{totals[some] / totals[every]:.1%}")
    rows = merged(read_rows(text, COLUMNS), [(*row, day)], key=lambda own: own[0])
    return write_rows(text, COLUMNS, sorted(rows))


def main(package: str, report: str) -> None:
    """Notes a report of today."""
    totals = json.loads(Path(report).read_text("utf-8"))["totals"]
    day = datetime.now(UTC).date().isoformat()
    PAGE.write_text(note(PAGE.read_text("utf-8"), package, totals, day), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

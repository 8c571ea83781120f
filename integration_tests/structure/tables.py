"""Rows of a page's table, read and written back by the sessions that measure them."""

from collections.abc import Callable, Iterable
from typing import Any

Row = tuple[str, ...]


def read_rows(text: str, columns: Row) -> list[Row]:
    """Returns the rows of the one table with these columns."""
    _, rows, _ = _parts(text, columns)
    return rows


def write_rows(text: str, columns: Row, rows: Iterable[Row]) -> str:
    """Returns the page with other rows in the table with these columns."""
    before, _, after = _parts(text, columns)
    return "\n".join([*before, *map(_line, rows), *after]) + "\n"


def merged(
    rows: Iterable[Row], new: Iterable[Row], key: Callable[[Row], Any]
) -> list[Row]:
    """Returns old and new rows, a new one in place of the old one of its key."""
    return list({key(row): row for row in [*rows, *new]}.values())


def _parts(text: str, columns: Row) -> tuple[list[str], list[Row], list[str]]:
    """Returns the lines up to the table's rule, its rows, and the lines after."""
    lines = text.splitlines()
    if lines.count(_line(columns)) != 1:
        raise ValueError(
            f"the page must have one table that begins with {_line(columns)!r}"
        )
    first = lines.index(_line(columns)) + 2
    last = first
    while last < len(lines) and lines[last].startswith("|"):
        last += 1
    rows = [tuple(map(str.strip, line.split("|")[1:-1])) for line in lines[first:last]]
    return lines[:first], rows, lines[last:]


def _line(row: Row) -> str:
    return f"| {' | '.join(row)} |"

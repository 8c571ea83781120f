"""The conformance table of docs/conformance.md.

``python -m conformance.page``, from the folder above, prints it.
"""

import argparse
from collections.abc import Sequence

if __name__ == "__main__":  # Help and wrong options do not wait for TensorFlow.
    argparse.ArgumentParser(description=__doc__).parse_args()

from conformance.models import KINDS
from conformance.programs import in_function
from conformance.rows import Row, rows


def table(lines: Sequence[Row]) -> str:
    """Writes a row a line, and in each cell the numbers of towers."""
    head = ["builder", "reducer", "optimizer", *KINDS, "XLA"]
    cells = [head, ["---"] * len(head), *map(_cells, lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def is_exact(row: Row, num_towers: int) -> bool:
    """Tells whether the numbers are whole multiples of a power of two throughout."""
    return num_towers != 3 or not row.average


def _cells(row: Row) -> list[str]:
    reducer = f"`{row.reducer}`" if row.reducer else "(its own)"
    counts = (_counts(row, kind) for kind in KINDS)
    return [f"`{row.builder}`", reducer, row.optimizer, *counts, _by_xla(row)]


def _by_xla(row: Row) -> str:
    """Says what XLA compiles, as far as it is the same for all kinds."""
    if row.run.func is not in_function:
        return ""
    said = [] if row.is_compiled("dense", 2) else ["one tower"]
    said += [] if row.is_compiled("sparse", 1) else ["not sparse"]
    return ", ".join(said) or "yes"


def _counts(row: Row, kind: str) -> str:
    has_tables = any(part.is_table for part in KINDS[kind])
    return " ".join(
        ("" if is_exact(row, count) else "≈")
        + str(count)
        + ("ᵈ" if has_tables and row.moves_all_rows(count) else "")
        for count in row.counts
    )


if __name__ == "__main__":
    print(table(rows()), end="")

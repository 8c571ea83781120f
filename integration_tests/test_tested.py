"""Runs that passed become rows of docs/tested.md, each for what it ran."""

import re

import pytest
from structure import covered
from structure.tables import read_rows
from structure.tested import ALL, COLUMNS, PAGE, note, scope

EMPTY = "# Page\n\n| " + " | ".join(COLUMNS) + " |\n|---|\n\nThe end.\n"
LOWEST = ("lowest", "2.18.0", "3.5.0", "1.26.0", "3.11.9", "Linux x86_64", ALL, "d1")
NIGHTLY = (
    *("nightly", "2.22.0.dev20260101", "3.16.0.dev1", "2.5.0", "3.13.1"),
    *("Linux x86_64", ALL, "d1"),
)


def changed(row, **columns):
    names = [name.replace(" ", "_").lower() for name in COLUMNS]
    return tuple(columns.get(n, old) for n, old in zip(names, row, strict=True))


def noted(*rows):
    text = EMPTY
    for row in rows:
        text = note(text, row)
    return read_rows(text, COLUMNS)


def test_a_run_takes_the_place_of_an_earlier_one_of_the_same_and_of_no_other():
    line = "| " + " | ".join(LOWEST) + " |"
    assert note(EMPTY, LOWEST) == EMPTY.replace("|---|\n", f"|---|\n{line}\n")
    later = changed(LOWEST, tensorflow="2.18.1", python="3.11.12", on="d2")
    assert noted(LOWEST, later) == [later]
    night = changed(NIGHTLY, tensorflow="2.23.0.dev20260301", on="d2")
    assert noted(NIGHTLY, night) == [night]
    for other in (
        {"dependencies": "newest"},
        {"tensorflow": "2.19.0"},
        {"python": "3.12.1"},
        {"platform": "Darwin arm64"},
    ):
        row = changed(LOWEST, **other)
        assert set(noted(LOWEST, row)) == {LOWEST, row}
        assert noted(LOWEST, row) == noted(row, LOWEST)
    assert noted(LOWEST, NIGHTLY)[0] == NIGHTLY  # the newest first
    part = changed(LOWEST, tests_of="tw-core")
    assert noted(part) == [part]
    assert noted(part, LOWEST) == noted(LOWEST, part) == [LOWEST]


@pytest.mark.parametrize(
    ("words", "packages"),
    [
        ([], ALL),
        (["--numprocesses=2", "-q"], ALL),
        (["packages/tw-core/tests"], "tw-core"),
        (["packages/tw-reduce/tests/", "packages/tw-core/tests"], "tw-core, tw-reduce"),
        (["-k", "sum"], ""),
        (["packages/tw-core/tests/test_towers.py"], ""),
        (["packages/tw-core/tests", "--lf"], ""),
        (["packages/tw-nothing/tests/test_x.py::test_y"], ""),
    ],
)
def test_a_run_counts_for_the_packages_whose_tests_it_ran_in_full(words, packages):
    assert scope(words) == packages


def test_the_page_has_what_the_sessions_write():
    text = PAGE.read_text()
    rows = read_rows(text, COLUMNS)
    for row in rows:
        assert row[0] in {"lowest", "newest", "nightly"}
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", row[-1])
    again = text
    for row in rows:
        again = note(again, row)
    assert again == text


def test_a_packages_branches_are_a_row_among_those_of_the_others():
    totals = dict(
        zip(
            ("num_statements", "covered_lines", "num_branches", "covered_branches"),
            (2000, 1900, 300, 201),
            strict=True,
        )
    )
    text = f"| {' | '.join(covered.COLUMNS)} |\n|---|\n\nThe end.\n"
    for package, day in (("tw-x", "d1"), ("tw-a", "d1"), ("tw-x", "d2")):
        text = covered.note(text, package, totals, day)
    row = ("2,000", "95.0%", "300", "67.0%")
    found = read_rows(text, covered.COLUMNS)
    assert found == [("tw-a", *row, "d1"), ("tw-x", *row, "d2")]
    read_rows(covered.PAGE.read_text(), covered.COLUMNS)  # has the table

"""A change of the interface demands a version, by what it breaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interfaces.api_file import difference, parse, render
from interfaces.versions import (
    InterfaceChange,
    bump,
    complaint,
    due_part,
    due_version,
    interface_change,
)
from packaging.version import Version

LINES = st.lists(st.sampled_from([f"def toy.f{i}()" for i in range(8)]), unique=True)
VERSIONS = st.tuples(*[st.integers(0, 20)] * 3).map(
    lambda parts: Version(".".join(map(str, parts)))
)


@pytest.mark.parametrize(
    ("last", "removed", "added", "due"),
    [
        ("0.1.0", [], [], "0.1.0"),
        ("0.1.0", [], ["a"], "0.1.1"),
        ("0.1.4", ["a"], [], "0.2.0"),
        ("0.1.4", ["a"], ["b"], "0.2.0"),
        ("1.2.3", [], ["a"], "1.2.4"),
        ("1.2.3", ["a"], [], "2.0.0"),
    ],
)
def test_what_breaks_users_demands_more_than_what_only_comes(last, removed, added, due):
    change = InterfaceChange(tuple(removed), tuple(added))
    assert due_version(Version(last), change) == Version(due)


@given(before=LINES, after=LINES, last=VERSIONS, now=VERSIONS)
def test_a_version_is_refused_exactly_when_it_is_below_the_one_that_is_due(
    before, after, last, now
):
    change = interface_change(before, after)
    due = due_version(last, change)
    said = complaint(last, now, change)
    assert bool(said) == (now < due)
    if said and (change.removed or change.added):
        assert f"must be {due} or higher; got {now}." in said
        assert all(f"- {line}" in said for line in set(before) - set(after))
        assert all(f"+ {line}" in said for line in set(after) - set(before))


@given(version=VERSIONS)
def test_a_bump_raises_one_part_and_clears_those_behind_it(version):
    major, minor, patch = version.release
    assert bump(version, "patch").release == (major, minor, patch + 1)
    assert bump(version, "minor").release == (major, minor + 1, 0)
    assert bump(version, "major").release == (major + 1, 0, 0)


@given(before=LINES, after=LINES, last=VERSIONS)
def test_the_part_that_is_due_makes_the_version_that_is_due(before, after, last):
    change = interface_change(before, after)
    part = due_part(last, change)
    assert due_version(last, change) == (bump(last, part) if part else last)
    assert bool(part) == (set(before) != set(after))


def test_an_unknown_part_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'mayor'; use one of patch, minor, major"):
        bump(Version("1.0.0"), "mayor")


def test_a_version_below_the_last_release_is_refused_without_any_change():
    said = complaint(Version("0.2.0"), Version("0.1.0"), InterfaceChange((), ()))
    assert said == "the version is 0.1.0, which is below the last release, 0.2.0."


@given(lines=LINES)
def test_a_file_holds_the_lines_that_it_was_made_of(lines):
    assert parse(render("tw-toy", lines)) == lines


@given(frozen=LINES, code=LINES)
def test_the_difference_names_every_line_that_only_one_side_has(frozen, code):
    frozen, code = sorted(frozen), sorted(code)
    shown = set(difference(frozen, code).splitlines())
    assert shown == {f"- {line}" for line in set(frozen) - set(code)} | {
        f"+ {line}" for line in set(code) - set(frozen)
    }

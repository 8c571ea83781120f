"""The choice of combinations: it holds what it promises, and is small."""

from itertools import combinations

import pytest
from covering import cover
from hypothesis import given
from hypothesis import strategies as st

pytest_plugins = ["pytester"]

CASES = st.lists(
    st.fixed_dictionaries({name: st.integers(0, 3) for name in "abc"}), max_size=30
)


def held(cases, strength):
    return {
        pair for case in cases for pair in combinations(sorted(case.items()), strength)
    }


@given(CASES, st.sampled_from([1, 2, 3]))
def test_whatever_meets_in_all_cases_meets_in_the_chosen(cases, strength):
    chosen = [cases[index] for index in cover(cases, strength)]
    assert held(chosen, strength) == held(cases, strength)
    assert len(chosen) <= len(held(cases, strength))


SUITE = """
import pytest

@pytest.fixture(params=["x", "y"])
def made(request):
    return request.param

@pytest.mark.parametrize("first", [1, True, 2])
@pytest.mark.parametrize("second", [[], {}, ()])
def test_pairs(made, first, second): pass

@pytest.mark.each_choice
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("second", [4, 5])
def test_choices(first, second): pass

@pytest.mark.parametrize("first, second", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_chosen_by_hand(made, first, second): pass

def test_alone(): pass

@pytest.mark.full
def test_by_night(): pass

@pytest.mark.full("4-1", "5-2")
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [4, 5])
def test_two_by_day(first, second): pass
"""


@pytest.mark.parametrize(
    ("which", "arguments", "ran"),
    [
        ("", [], 9 + 3 + 8 + 1 + 2),
        ("full", [], 18 + 6 + 8 + 1 + 5),
        ("", ["-k", "two_by_day and 5-1"], 0),
        ("", ["-k", "two_by_day and 4-"], 1),
        ("", ["::test_by_night"], 1),
    ],
)
def test_a_suite_runs_a_cover_of_its_cases(
    pytester, monkeypatch, which, arguments, ran
):
    monkeypatch.setenv("TOWERS_TESTS", which)
    monkeypatch.syspath_prepend(pytester.path)
    pytester.makeconftest("from covering import *")
    path = pytester.makepyfile(SUITE)
    words = [f"{path}{word}" if word[:2] == "::" else word for word in arguments]
    result = pytester.runpytest_inprocess("-p", "no:xdist", "--strict-markers", *words)
    assert result.parseoutcomes().get("passed", 0) == ran


def test_a_case_that_is_not_there_cannot_run_by_day(pytester, monkeypatch):
    monkeypatch.delenv("TOWERS_TESTS", raising=False)
    pytester.makeconftest("from covering import *")
    pytester.makepyfile(SUITE.replace('"5-2"', '"6-2"'))
    result = pytester.runpytest_inprocess("-p", "no:xdist", "--strict-markers")
    assert "names no case of it: {'6-2'}" in result.stderr.str()

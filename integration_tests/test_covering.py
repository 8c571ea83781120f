"""The choice of combinations: it holds what it promises, and is small."""

from itertools import combinations, product

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


@given(CASES, st.sampled_from([1, 2]))
def test_no_chosen_case_adds_nothing_to_those_before(cases, strength):
    assert len(cover(cases, strength)) <= len(held(cases, strength))


def test_pairs_are_far_fewer_than_all():
    every = [
        dict(zip("abc", case, strict=True)) for case in product(range(5), repeat=3)
    ]
    assert len(cover(every, 1)) == 5
    assert 25 <= len(cover(every, 2)) <= 40


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
    ("which", "ran"), [("", 9 + 3 + 8 + 1 + 2), ("full", 18 + 6 + 8 + 1 + 5)]
)
def test_a_suite_runs_a_cover_of_its_cases(pytester, monkeypatch, which, ran):
    monkeypatch.setenv("TOWERS_TESTS", which)
    monkeypatch.syspath_prepend(pytester.path)
    pytester.makeconftest("from covering import *")
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-p", "no:xdist", "--strict-markers")
    result.assert_outcomes(passed=ran, deselected=38 - ran)


def test_a_case_that_is_not_there_cannot_run_by_day(pytester):
    pytester.makeconftest("from covering import *")
    pytester.makepyfile(SUITE.replace('"5-2"', '"6-2"'))
    result = pytester.runpytest_inprocess("-p", "no:xdist", "--strict-markers")
    assert "names no case of it: {'6-2'}" in result.stderr.str()


@pytest.mark.parametrize(("what", "ran"), [("5-1", 0), ("4-", 1)])
def test_a_case_that_is_chosen_by_k_runs_where_it_would_by_day(pytester, what, ran):
    pytester.makeconftest("from covering import *")
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess(
        "-p", "no:xdist", "-k", f"two_by_day and {what}"
    )
    result.assert_outcomes(passed=ran, deselected=38 - ran)


def test_what_is_named_runs_by_day(pytester, monkeypatch):
    monkeypatch.delenv("TOWERS_TESTS", raising=False)
    pytester.makeconftest("from covering import *")
    path = pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-p", "no:xdist", f"{path}::test_by_night")
    result.assert_outcomes(passed=1)

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
"""


@pytest.mark.parametrize(
    ("which", "ran"), [("", 9 + 3 + 8 + 1), ("full", 18 + 6 + 8 + 1)]
)
def test_a_suite_runs_a_cover_of_its_cases(pytester, monkeypatch, which, ran):
    monkeypatch.setenv("TOWERS_TESTS", which)
    monkeypatch.syspath_prepend(pytester.path)
    pytester.makeconftest("from covering import *")
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-p", "no:xdist", "--strict-markers")
    result.assert_outcomes(passed=ran, deselected=33 - ran)

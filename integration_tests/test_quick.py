"""Which cases are quick: the choice, what is noted of them, and what lint refuses."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quick import cover
from structure import durations
from structure.users import named_by

pytest_plugins = ["pytester"]

CASES = st.lists(
    st.fixed_dictionaries({name: st.integers(0, 3) for name in "abc"}), max_size=30
)


@pytest.mark.slow(by_day=True)  # by night with more examples
@given(CASES)
def test_each_value_of_all_cases_is_among_the_chosen(cases):
    chosen = [cases[index] for index in cover(cases)]
    values = {value for case in cases for value in case.items()}
    assert {value for case in chosen for value in case.items()} == values
    assert len(chosen) <= len(values)


@pytest.mark.slow(by_day=True)
def test_a_package_names_its_tests_and_those_that_use_it():
    found = {str(path) for path in named_by("tw-horovod")}
    assert "packages/tw-horovod/tests" in found
    # One imports it, one starts a program that does, one runs all pages.
    used = ("test_horovod_programs", "test_horovod_table", "test_readmes")
    assert found > {f"integration_tests/{name}.py" for name in used}
    assert "integration_tests/test_sharded_epochs.py" not in found
    assert list(named_by("gallery")) == [
        Path("integration_tests/test_keras_gallery.py")
    ]
    assert list(named_by("nothing of this name")) == []


SUITE = """
import pytest

@pytest.fixture(params=["x", "y"])
def made(request):
    return request.param

@pytest.mark.parametrize("first", [1, True, 2])
@pytest.mark.parametrize("second", [[], {}])
def test_choices(made, first, second): pass

@pytest.mark.parametrize("first, second", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_chosen_by_hand(made, first, second): pass

def test_alone(): pass

@pytest.mark.slow
def test_by_night(): pass

@pytest.mark.slow(by_day=True)
@pytest.mark.parametrize("first", [1, 2])
def test_by_day(first): pass

@pytest.mark.slow(by_day=["4-1", "5-2"])
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [4, 5])
def test_two_by_day(first, second): pass

@pytest.mark.parametrize("first", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("second", [4, 5])
def test_one_value_by_night(first, second): pass

@pytest.mark.slow
class TestsByNight:
    def test_first(self): pass
    def test_second(self): pass
"""


def run(pytester, *words):
    pytester.makeconftest("from quick import *")
    own = ("--rootdir", pytester.path, "-p", "no:xdist", "--strict-markers")
    return pytester.runpytest_inprocess(*own, *words)


@pytest.mark.parametrize(
    ("which", "words", "ran"),
    [
        ("", [], 3 + 4 + 1 + 2 + 2 + 2),
        ("full", [], 12 + 8 + 1 + 1 + 2 + 4 + 4 + 2),
        ("", ["-k", "two_by_day and 5-1"], 0),
        ("", ["-k", "two_by_day and 4-"], 1),
        ("", ["::test_by_night"], 1),
    ],
)
def test_a_suite_runs_what_is_quick(pytester, monkeypatch, which, words, ran):
    result = pytester.path / "result.json"
    monkeypatch.setattr("quick.IS_FULL", which == "full")
    monkeypatch.setenv("TOWERS_RESULT", str(result))
    path = pytester.makepyfile(SUITE)
    words = [f"{path}{word}" if word[:2] == "::" else word for word in words]
    outcomes = run(pytester, *words).parseoutcomes()
    assert outcomes.get("passed", 0) == ran
    said = json.loads(result.read_text())
    assert said["passed"] == ran
    if not words:
        assert ran + said["left_out"] == 12 + 8 + 1 + 1 + 2 + 4 + 4 + 2


def test_a_case_that_is_not_there_cannot_run_by_day(pytester, monkeypatch):
    monkeypatch.setattr("quick.IS_FULL", False)
    pytester.makepyfile(SUITE.replace('"5-2"', '"6-2"'))
    assert "slow names no case: {'6-2'}" in run(pytester).stderr.str()


TIMED = """
import pytest, time

@pytest.mark.parametrize("seconds", [0, 1.1])
def test_it(seconds):
    time.sleep(seconds)

def test_quick(): pass
"""


def test_a_run_rewrites_the_durations_of_what_it_ran(pytester, monkeypatch):
    file = pytester.path / "durations.txt"
    file.write_text("9.0 test_other.py::test_b\n3.0 test_own.py::test_quick\n")
    monkeypatch.setenv("TOWERS_DURATIONS", str(file))
    pytester.makepyfile(test_own=TIMED)
    run(pytester)
    kept, own = file.read_text().splitlines()
    assert kept == "9.0 test_other.py::test_b"
    seconds, name = own.split()  # More on a busy machine.
    assert name == "test_own.py::test_it"
    assert float(seconds) >= 1.1


MARKED = """
import pytest
pytestmark = [{module}]

@pytest.mark.parametrize("n", [1])
{test}
def test_a(n): pass

{klass}
class TestAll:
    def test_b(self): pass
"""
SLOW = "pytest.mark.slow"


@pytest.mark.parametrize(
    ("marks", "refused"),
    [
        ({}, ["test_a", "test_b"]),
        ({"module": SLOW}, []),
        ({"test": f"@{SLOW}(by_day=True)"}, ["test_b"]),
        ({"klass": f"@{SLOW}"}, ["test_a"]),
    ],
)
def test_what_is_slow_and_not_marked_is_refused(tmp_path, marks, refused):
    (tmp_path / "integration_tests").mkdir()
    marked = {"module": "", "test": "", "klass": "", **marks}
    (tmp_path / "test_x.py").write_text(MARKED.format(**marked))
    tests = {"test_a": 2.0, "TestAll::test_b": 3.5, "test_gone": 1.0}
    file = tmp_path / durations.FILE
    durations.write(file, {f"test_x.py::{name}": s for name, s in tests.items()})
    durations.note_all(7200, file)
    assert file.read_text().startswith("7200.0 ")  # read by the session's last line
    *slow, gone = durations.find_slow(tmp_path)
    assert "test_gone, which is no more" in gone
    assert [name for name in ("test_a", "test_b") if any(name in x for x in slow)] == (
        refused
    )
    assert len(slow) == len(refused)

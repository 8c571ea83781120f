"""Another project's tests: compared with a list of those that fail, and run apart."""

import sys

import pytest
from harness import foreign_tests
from harness.processes import is_alive, wait_until
from programs.foreign_endings import end, hang

FILE = "their_test.py"
SOURCE = """
class Cases:
    def test_one(self): ...
    def helper(self): ...
    def test_two(self): ...
"""


def run_main(tmp_path, monkeypatch, outcomes, known, *options, **settings):
    (tmp_path / FILE).write_text(SOURCE)
    listed = tmp_path / "list.toml"
    entries = [f'"Cases::{name}" = "a reason"' for name in known]
    listed.write_text("\n".join(["[deviations]", *entries]))
    monkeypatch.setattr(sys, "argv", ["client", *map(str, options)])
    return foreign_tests.main(
        *("Theirs", [FILE], lambda file, name: (outcomes[name.split("::")[1]], "")),
        deviations=listed,
        **settings,
    )


@pytest.mark.parametrize(
    ("two", "known", "settings", "told"),
    [
        ("passed", [], {}, None),
        ("failed", ["test_two"], {}, None),
        ("hung", [], {}, "not listed: Cases::test_two hung"),
        ("skipped", [], {}, "not listed: Cases::test_two skipped"),
        ("skipped", [], {"may_skip": True}, None),
        ("passed", ["test_two"], {}, "listed, but passed: Cases::test_two"),
        ("passed", ["test_six"], {}, "listed, but not found: Cases::test_six"),
    ],
)
def test_outcomes_must_be_those_of_the_list(
    tmp_path, monkeypatch, capsys, two, known, settings, told
):
    outcomes = {"test_one": "passed", "test_two": two}
    status = run_main(tmp_path, monkeypatch, outcomes, known, tmp_path, **settings)
    assert status == (0 if told is None else 1)
    assert told is None or told in capsys.readouterr().out


def test_a_run_that_finds_no_test_fails(tmp_path, monkeypatch, capsys):
    options = [tmp_path, "--only", "nothing"]
    assert run_main(tmp_path, monkeypatch, {}, [], *options) == 1
    assert "no test was found" in capsys.readouterr().out


def test_without_a_checkout_nothing_runs(tmp_path, monkeypatch, capsys):
    assert run_main(tmp_path, monkeypatch, {}, []) == 0
    assert "No test ran: give a checkout of Theirs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hows", "outcome"),
    [
        (["passed", "passed"], "passed"),
        (["passed", "failed"], "unlike"),
        (["passed", "crashed"], "crashed"),
    ],
)
def test_processes_have_one_outcome(hows, outcome):
    arguments = [(how,) for how in hows]
    found, output = foreign_tests.run_apart(end, arguments, deadline_s=120)
    assert found == outcome
    assert "its output" in output


@pytest.mark.slow
def test_processes_that_hang_are_killed_with_their_children(tmp_path):
    started = tmp_path / "started"
    # The first process is forked from one that must import TensorFlow.
    foreign_tests.run_apart(end, [("passed",)], deadline_s=120)
    found, _ = foreign_tests.run_apart(hang, [(started,)], deadline_s=5)
    assert found == "hung"
    pids = [int(pid) for pid in started.read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids))

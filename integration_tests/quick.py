"""Which cases run for every change, of all that there are.

A case that takes two seconds or more, or waits for clocks or processes, is marked
``slow``, by itself or with its test, class or module, and runs in the session ``full``.
``slow(by_day=True)`` keeps a test in the day nevertheless, ``slow(by_day=["2-sum"])``
one case of it: what a change must not break although it takes long, and the short
cases of a long test.

Of the other tests, those cases run by day that hold each value of each parameter: a
test of three parameters with five values each has 125 cases, of which five run. What is
one parametrization, as of ``("name", "want")``, counts as one parameter: its cases were
chosen by hand.

All cases run where the environment has ``TOWERS_TESTS=full``. A test that is named on
the command line (``file.py::test``) runs as it is named. The hooks below are imported
by ``packages/conftest.py`` and that of the integration tests. They also write how many
ran, and how long they took, into the files that ``TOWERS_RESULT`` and
``TOWERS_DURATIONS`` name, for the sessions of nox.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from structure import durations

Case = Mapping[str, Hashable]
IS_FULL = os.environ.get("TOWERS_TESTS") == "full"
LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow(by_day=False): runs in `full`; by day these cases, or all"
    )
    config.stash[LEFT_OUT] = 0
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Record(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


class _Record:
    """Notes what ran, and how long its slowest case took."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        # What tests start writes no such file.
        self.result = os.environ.pop("TOWERS_RESULT", "")
        self.durations = os.environ.pop("TOWERS_DURATIONS", "")
        self.passed = 0
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.passed += report.passed
            test = _test_of(report.nodeid)
            self.seconds[test] = max(report.duration, self.seconds.get(test, 0.0))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # Each process leaves out the same.
        left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
        self.config.stash[LEFT_OUT] = left_out

    def pytest_sessionfinish(self) -> None:
        if self.result:
            counts = {"passed": self.passed, "left_out": self.config.stash[LEFT_OUT]}
            Path(self.result).write_text(json.dumps(counts))
        if self.durations:
            durations.write(Path(self.durations), self.seconds)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    named = any("::" in argument for argument in config.args)
    if named or IS_FULL:
        return (yield)
    for cases in _by_test(items).values():
        _check_ids(cases)
    yield  # -k and -m choose first
    left_out = {item for cases in _by_test(items).values() for item in _by_night(cases)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    config.stash[LEFT_OUT] += len(left_out)


def _by_test(items: Sequence[Any]) -> dict[str, list[Any]]:
    tests = defaultdict(list)
    for item in items:
        tests[_test_of(item.nodeid)].append(item)
    return tests


def _test_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _by_day(item: Any) -> bool | Sequence[str]:
    """Returns the argument of the nearest mark; True for a case that has none."""
    mark = item.get_closest_marker("slow")
    return True if mark is None else mark.kwargs.get("by_day", False)


def _check_ids(cases: Sequence[Any]) -> None:
    named = {one for item in cases for one in (_by_day(item) if _has_ids(item) else ())}
    unknown = named - {_id(item) for item in cases}
    if unknown:
        raise pytest.UsageError(f"{cases[0].nodeid}: slow names no case: {unknown}")


def _has_ids(item: Any) -> bool:
    return not isinstance(_by_day(item), bool)


def _id(item: Any) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""


def _by_night(cases: Sequence[Any]) -> set[Any]:
    """Returns those of a test's cases that wait for the night."""
    chosen = {item for item in cases if _has_ids(item) and _id(item) in _by_day(item)}
    quick = [item for item in cases if _by_day(item) is True]
    chosen |= {quick[n] for n in cover([_case(item) for item in quick])}
    return set(cases) - chosen


def cover(cases: Sequence[Case]) -> list[int]:
    """Chooses the first of the cases that hold each value that a parameter has.

    Returns indices in order; in turns the first of the cases that add the most.
    """
    held = [set(case.items()) for case in cases]
    left: set[tuple[str, Hashable]] = set().union(*held)
    chosen = [0] if cases and not left else []  # a test without parameters
    while left:
        best = max(range(len(cases)), key=lambda index: len(held[index] & left))
        chosen.append(best)
        left -= held[best]
    return sorted(chosen)


def _case(item: Any) -> Case:
    """Returns the parameters: one for each parametrization, and for each fixture's."""
    if not hasattr(item, "callspec"):
        return {}
    alone = dict(item.callspec.params)
    together: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.kwargs.get("argnames", mark.args[0] if mark.args else ())
        if isinstance(names, str):
            names = names.replace(",", " ").split()
        values = [_hashable(alone.pop(name)) for name in names if name in alone]
        together[" ".join(names)] = tuple(values)
    return together | {name: _hashable(value) for name, value in alone.items()}


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)  # 1 and True are two values

"""Which combinations of a test's parameters run, of all that it could.

A test of three parameters with five values each has 125 cases; 25 of them hold every
pair of values, and most faults of combinations need no more than two values to meet.
So the hook below, which ``packages/conftest.py`` and that of the integration tests
import, leaves of each test the first cases that hold every pair, and of one marked
``each_choice`` those that hold every value. What is one parametrization, as of
``("name", "want")``, counts as one parameter: its cases were chosen by hand.

Tests that take long are marked ``full``, with the ids of the cases that run
nevertheless: a short form of each family. All cases of all tests run where the
environment has ``TOWERS_TESTS=full``, as in the session ``full``. A test that is named
on the command line (``file.py::test``) runs as it is named.
"""

import os
from collections import defaultdict
from collections.abc import Generator, Hashable, Mapping, Sequence
from itertools import combinations
from operator import itemgetter
from typing import Any

import pytest

Case = Mapping[str, Hashable]
NAME = itemgetter(0)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "each_choice: run each value of each parameter, not each pair"
    )
    config.addinivalue_line(
        "markers", "full(*ids): by day run these cases only, or none; by night all"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    named = any("::" in argument for argument in config.args)
    if named or os.environ.get("TOWERS_TESTS") == "full":
        return (yield)
    ids = {
        name: {case.callspec.id for case in cases}
        for name, cases in _cases_by_test(items).items()
    }
    yield  # -k and -m choose; the marks name cases of all that were collected
    tests = _cases_by_test(items)
    left_out = {item for item in items if _is_for_the_night(item, ids)}
    for cases in tests.values():
        if cases[0].get_closest_marker("full"):
            continue
        strength = 1 if cases[0].get_closest_marker("each_choice") else 2
        chosen = cover([_case(item) for item in cases], strength)
        left_out |= set(cases).difference(cases[index] for index in chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _cases_by_test(items: Sequence[Any]) -> dict[str, list[Any]]:
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    return tests


def _is_for_the_night(item: Any, ids: Mapping[str, set[str]]) -> bool:
    mark = item.get_closest_marker("full")
    if mark is None:
        return False
    known = ids.get(item.nodeid.partition("[")[0], set())
    unknown = set(mark.args) - known
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: full names no case of it: {unknown}")
    return not (known and item.callspec.id in mark.args)


def cover(cases: Sequence[Case], strength: int) -> list[int]:
    """Chooses cases so that the values of any few parameters meet as in all of them.

    Of so many parameters at a time (``strength``). Returns indices in order; in turns
    the first of the cases that add the most.
    """
    held = [
        set(combinations(sorted(case.items(), key=NAME), min(strength, len(case))))
        for case in cases
    ]
    left: set[tuple[tuple[str, Hashable], ...]] = set().union(*held)
    chosen = []
    while left:
        best = max(range(len(cases)), key=lambda index: len(held[index] & left))
        chosen.append(best)
        left -= held[best]
    return sorted(chosen)


def _case(item: Any) -> Case:
    """Returns the parameters: one for each parametrization, and for each fixture's."""
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

"""Clusters and groups of ranks, whose processes end with the test."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from harness.processes import make_template


@pytest.fixture(scope="session")
def processes() -> Any:
    """A template process that has imported TensorFlow, from which tasks are forked."""
    return make_template()


@pytest.fixture
def make_cluster(processes: Any) -> Any:
    """Makes clusters, and ends all their processes after the test."""
    from harness.tasks import Tasks

    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Tasks:
            tasks = Tasks(processes, **options)
            stack.callback(tasks.kill)
            tasks.serve()
            return tasks

        yield make


@pytest.fixture
def make_ranks(processes: Any) -> Any:
    """Makes groups of ranks, and ends all their processes after the test."""
    from harness.ranks import Ranks

    with contextlib.ExitStack() as stack:

        def make(*arguments: Any, **options: Any) -> Ranks:
            return stack.enter_context(Ranks(processes, *arguments, **options))

        yield make


@pytest.fixture(scope="module")
def groups(processes: Any) -> Iterator[Any]:
    """Starts a group of each size, engine and arguments of ``join`` that tests ask for.

    One that a test's failure has ended is replaced.
    """
    from harness.ranks import Ranks

    started: dict[tuple[Any, ...], Ranks] = {}
    with contextlib.ExitStack() as stack:

        def of(size: int, engine: str = "", **joining: Any) -> Any:
            key = (size, engine, *joining.items())
            found = started.get(key)
            if found is None or found.has_ended:
                options: dict[str, Any] = {"engine": engine, "towers": 8, **joining}
                found = stack.enter_context(Ranks(processes, size, **options))
                started[key] = found.joined()
            return found

        yield of

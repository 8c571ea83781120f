"""These tests are about what users install, so they refuse to run on the sources.

Hypothesis has no deadline, as machines differ, and is the same at every run, of
25 examples by day and 100 by night. ``--hypothesis-profile=default`` explores at
random.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.fixtures import groups, make_cluster, make_ranks, processes
from hypothesis import settings
from quick import (
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_sessionfinish,
)

__all__ = [
    "groups",
    "make_cluster",
    "make_ranks",
    "processes",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_sessionfinish",
]

PACKAGES = Path(__file__).parents[1] / "packages"

collect_ignore = ["lab"]

examples = 100 if os.environ.get("TOWERS_TESTS") == "full" else 25
settings.register_profile(
    "towers", deadline=None, derandomize=True, max_examples=examples
)
settings.load_profile("towers")
os.environ["TW_REPORTS"] = ""  # Errors carry their reports, and write no files.


def pytest_sessionstart() -> None:
    found = sorted(path.parent.name for path in PACKAGES.glob("*/pyproject.toml"))
    modules = [name.replace("-", "_") for name in found]
    faults = [fault for module in modules if (fault := _fault(module))]
    if faults:
        raise pytest.UsageError(
            "The integration tests run on built wheels, as `nox -s integration` "
            "installs them; " + "; ".join(faults)
        )
    start_devices()


def start_devices() -> None:
    # Once for all modules, before any of them starts TensorFlow.
    from tw_core.testing import start_logical_cpus

    start_logical_cpus()


def _fault(module: str) -> str | None:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return f"{module} is not installed"
    if Path(spec.origin).is_relative_to(PACKAGES):
        return f"{module} comes from the checkout"
    return None

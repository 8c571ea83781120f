"""Every package imports at once, and leaves TensorFlow for when it is needed."""

import functools
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from interfaces.manifest import read_manifests

ROOT = Path(__file__).parents[1]
MODULES = [manifest.module for manifest in read_manifests(ROOT).values()]

PROBE = """
import sys, time
start = time.perf_counter()
import {module} as module
seconds = time.perf_counter() - start
loaded = "tensorflow" in sys.modules
import json
print(json.dumps({{"seconds": seconds, "loaded": loaded, "all": module.__all__}}))
"""


@functools.cache
def imported_afresh(module: str) -> tuple[dict[str, Any], ...]:
    """Imports a module in three new interpreters and tells what each of them saw."""
    command = [sys.executable, "-I", "-c", PROBE.format(module=module)]
    return tuple(
        json.loads(subprocess.check_output(command, text=True, timeout=60))
        for _ in range(3)
    )


@pytest.mark.parametrize("module", MODULES)
def test_the_import_takes_under_a_tenth_of_a_second(module):
    assert min(run["seconds"] for run in imported_afresh(module)) < 0.1


@pytest.mark.parametrize("module", MODULES)
def test_the_import_leaves_tensorflow_alone(module):
    assert not any(run["loaded"] for run in imported_afresh(module))


@pytest.mark.parametrize("module", MODULES)
def test_the_exported_names_are_sorted(module):
    names = imported_afresh(module)[0]["all"]
    assert names == sorted(names)


@pytest.mark.parametrize("module", MODULES)
def test_every_exported_name_can_be_imported(module):
    package = import_module(module)
    for name in package.__all__:
        assert getattr(package, name) is not None

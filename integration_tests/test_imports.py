"""Every package imports at once, and leaves TensorFlow for when it is needed."""

import json
import pkgutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import files
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
from interfaces.manifest import read_manifests

ROOT = Path(__file__).parents[1]
MANIFESTS = read_manifests(ROOT)
MODULES = [manifest.module for manifest in MANIFESTS.values()]


ATTEMPTS = 3
IMPORT_LIMIT_S = 0.1  # of processor time, which others leave alone
IMPORT = """
import json, sys, time
start = time.process_time()
import {}
seconds = time.process_time() - start
print(json.dumps([seconds, "tensorflow" in sys.modules]))
"""


@pytest.mark.parametrize("module", MODULES)
def test_the_import_is_quick_and_leaves_tensorflow_alone(module):
    command = [sys.executable, "-I", "-c", IMPORT.format(module)]
    runs = [json.loads(subprocess.check_output(command)) for _ in range(ATTEMPTS)]
    assert min(seconds for seconds, _ in runs) < IMPORT_LIMIT_S
    assert not any(loaded for _, loaded in runs)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there_and_says_what_it_is(module):
    package = import_module(module)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        public = getattr(package, name)
        is_described = isinstance(public, type | FunctionType | ModuleType)
        assert public is not None
        assert public.__doc__ or not is_described, name


@pytest.mark.parametrize("module", MODULES)
def test_no_module_hides_a_public_name(module):
    package = import_module(module)
    for found in pkgutil.walk_packages(package.__path__, f"{module}."):
        if not found.name.endswith("__main__"):
            import_module(found.name)
    for name in package.__all__:
        is_module = isinstance(getattr(package, name), ModuleType)
        assert is_module == (f"{module}.{name}" in sys.modules), name


@pytest.mark.parametrize("name", ["py.typed", "LICENSE"])
@pytest.mark.parametrize("distribution", MANIFESTS)
def test_the_wheel_holds_the_marker_of_types_and_the_licence(distribution, name):
    assert name in [file.name for file in files(distribution) or []]


FACES = [f"tw_{name}.internal" for name in ("core", "launch", "ranks", "reduce")]


@pytest.mark.parametrize("module", [*MODULES, *FACES])
def test_a_name_that_does_not_exist_is_refused_as_python_does_it(module):
    words = f"^module '{module}' has no attribute 'no_such_name'$"
    with pytest.raises(AttributeError, match=words):
        _ = import_module(module).no_such_name

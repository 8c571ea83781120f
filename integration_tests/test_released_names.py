"""What the last release of a package exports is there, if with a warning."""

import re
import warnings
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest
from interfaces.api import FILE, parse
from interfaces.manifest import find_releases, read_manifests
from interfaces.repository import Repository

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"\w+ ([\w.]+)")
OF_OBJECTS = re.compile(r"value [\w.]+\.[A-Z]\w*\.")


@pytest.mark.parametrize("package", read_manifests(ROOT))
def test_every_public_name_of_the_last_release_works_or_warns(package):
    repository = Repository(ROOT)
    try:
        releases = find_releases(repository, package)
    except RuntimeError as lack:
        pytest.skip(str(lack))
    last = releases[-1]
    text = repository.git("show", f"{last.commit}:{last.folder}/{FILE}")
    # Attributes that a constructor sets are not there without an object.
    lines = [line for line in parse(text) if not OF_OBJECTS.match(line)]
    lost = {}
    for name in (NAME.match(line)[1] for line in lines):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                find(name)
            except (AttributeError, ImportError) as error:
                lost[name] = str(error)
    assert lost == {}


def find(name):
    """Imports the module of a dotted name, as far as it is one, and reads the rest."""
    module, *rest = name.split(".")
    found = import_module(module)
    while rest and not hasattr(found, rest[0]):
        module = f"{module}.{rest.pop(0)}"
        found = import_module(module)
    return reduce(getattr, rest, found)


def test_a_name_that_is_lost_is_seen():
    assert find("tw_core.testing.run_in_graph")
    for name in ("tw_core.lost", "tw_core.Tower.lost", "tw_core.testing.lost"):
        with pytest.raises((AttributeError, ImportError)):
            find(name)

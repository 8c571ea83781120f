"""Every wheel holds its types' marker and its licence."""

from importlib.metadata import files
from pathlib import Path

import pytest
from interfaces.manifest import read_manifests

DISTRIBUTIONS = list(read_manifests(Path(__file__).parents[1]))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", ["py.typed", "LICENSE"])
def test_the_wheel_holds(distribution, name):
    assert name in [file.name for file in files(distribution) or []]

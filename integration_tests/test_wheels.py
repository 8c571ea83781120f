"""Every wheel holds its types' marker and its licence."""

from importlib.metadata import files

import pytest

DISTRIBUTIONS = [
    "tw-ampopt",
    "tw-builders",
    "tw-core",
    "tw-reduce",
    "tw-rlload",
    "tw-syncrep",
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", ["py.typed", "LICENSE"])
def test_the_wheel_holds(distribution, name):
    assert name in [file.name for file in files(distribution) or []]

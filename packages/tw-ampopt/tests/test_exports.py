"""The package exports exactly what ``__all__`` lists, and TensorFlow comes later."""

import subprocess
import sys

import pytest

import tw_ampopt


def test_the_exported_names_are_sorted():
    assert tw_ampopt.__all__ == sorted(tw_ampopt.__all__)


def test_every_exported_name_can_be_imported():
    for name in tw_ampopt.__all__:
        assert getattr(tw_ampopt, name) is not None


def test_names_that_do_not_exist_are_refused():
    with pytest.raises(AttributeError, match="has no attribute 'optimiser'"):
        tw_ampopt.optimiser  # noqa: B018


def test_dir_lists_the_exports():
    assert set(tw_ampopt.__all__) <= set(dir(tw_ampopt))


def test_importing_the_package_does_not_import_tensorflow():
    code = "import sys, tw_ampopt; print('tensorflow' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr

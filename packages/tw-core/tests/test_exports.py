"""The package exports exactly what ``__all__`` lists, and loads it lazily."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tw_core


def imports_for_type_checkers():
    """Maps each name imported under TYPE_CHECKING to the module it comes from."""
    tree = ast.parse(Path(tw_core.__file__).read_text())
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name: node.module
        for block in guarded
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_the_exported_names_are_sorted():
    assert tw_core.__all__ == sorted(tw_core.__all__)


def test_the_lazy_table_holds_the_exported_names_once_each():
    lazy = [name for names in tw_core._HOMES.values() for name in names]
    assert sorted(lazy) == tw_core.__all__


def test_type_checkers_find_each_name_where_the_lazy_table_does():
    lazy = {name: f"tw_core.{home}" for name, home in tw_core._HOME_OF.items()}
    assert imports_for_type_checkers() == lazy


@pytest.mark.parametrize("name", tw_core.__all__)
def test_every_exported_name_loads_from_its_module(name):
    module = import_module(f"tw_core.{tw_core._HOME_OF[name]}")
    assert getattr(tw_core, name) is getattr(module, name)


def test_every_exported_name_has_a_docstring_of_its_own():
    aliases = {"GradList", "Gradient"}
    for name in set(tw_core.__all__) - aliases:
        assert getattr(tw_core, name).__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tw_core' has no attribute 'nam'"):
        _ = tw_core.nam


def test_dir_lists_the_exported_names():
    assert set(tw_core.__all__) <= set(dir(tw_core))


def test_importing_the_package_does_not_import_tensorflow():
    probe = "import sys, tw_core; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


def test_the_testing_module_lists_its_names_sorted():
    testing = import_module("tw_core.testing")
    assert testing.__all__ == sorted(testing.__all__)
    for name in testing.__all__:
        assert getattr(testing, name) is not None

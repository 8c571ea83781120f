"""The examples in the docstrings hold."""

import doctest
from importlib import import_module
from pkgutil import iter_modules

import pytest

import tw_core

MODULES = sorted(module.name for module in iter_modules(tw_core.__path__))
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_examples(name):
    return doctest.testmod(import_module(f"tw_core.{name}"), optionflags=OPTIONS)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_hold(name):
    assert run_examples(name).failed == 0


def test_there_are_examples():
    assert sum(run_examples(name).attempted for name in MODULES) >= 7

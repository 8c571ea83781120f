"""The examples in the docstrings hold."""

import doctest
from importlib import import_module
from pkgutil import walk_packages

import pytest

import tw_core

MODULES = sorted(m.name for m in walk_packages(tw_core.__path__, "tw_core."))
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run_examples(name):
    return doctest.testmod(import_module(name), optionflags=OPTIONS)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_hold(name):
    assert run_examples(name).failed == 0


def test_there_are_examples():
    assert sum(run_examples(name).attempted for name in MODULES) >= 7

"""The frozen interface has the parameters that Python itself sees."""

import ast
import inspect
import pkgutil
import re
from collections import defaultdict
from enum import EnumType
from pathlib import Path
from typing import get_overloads

import pytest
from interfaces.api import parse

INTERFACES = sorted(Path(__file__).parents[1].glob("packages/*/api.txt"))
LINE = re.compile(r"(?:class|def) ([\w.]+)\((.*)")
# What a class without constructor takes from a builtin, or from ``enum``.
NOT_OURS = ["args", "kwargs"]


def frozen(path):
    """Lists the parameters of each line, by the name that the line is about."""
    found = defaultdict(list)
    for line in parse(path.read_text()):
        if match := LINE.fullmatch(line):
            found[match[1]].append(parameters(match[2]))
    return found


def parameters(text):
    """Reads names from the text behind an opening parenthesis."""
    for end in (i for i, sign in enumerate(text) if sign == ")"):
        try:
            [function] = ast.parse(f"def f({text[:end]}): ...").body
        except SyntaxError:
            continue  # a parenthesis within a parameter
        own = function.args
        every = [*own.posonlyargs, *own.args, own.vararg, *own.kwonlyargs, own.kwarg]
        return [one.arg for one in every if one]
    raise ValueError(f"no parameters in {text!r}")


def running(name):
    """Lists the parameters of each form of what is imported as ``name``."""
    above, _, last = name.rpartition(".")
    owner = pkgutil.resolve_name(above)
    find = inspect.getattr_static if inspect.isclass(owner) else getattr
    found = find(owner, last)
    found = getattr(found, "__func__", found)  # of a class or static method
    forms = get_overloads(inspect.unwrap(found)) if callable(found) else []
    return [signature(form) for form in forms or [found]]


def signature(form):
    if isinstance(form, EnumType):
        return NOT_OURS
    try:
        return list(inspect.signature(form).parameters)
    except ValueError:  # a builtin's constructor that does not tell its own
        return NOT_OURS


@pytest.mark.parametrize("path", INTERFACES, ids=lambda path: path.parent.name)
def test_every_line_has_the_parameters_of_what_is_imported(path):
    lines = frozen(path)
    assert lines
    wrong = {
        name: (listed, seen)
        for name, listed in lines.items()
        if listed != (seen := running(name)) and (listed, seen) != ([[]], [NOT_OURS])
    }
    assert not wrong

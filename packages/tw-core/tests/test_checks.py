"""Checks of arguments: what passes, and how the rest is refused."""

import math
import re
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

from tw_core import _checks


def test_the_names_are_sorted():
    assert _checks.__all__ == sorted(_checks.__all__)


@pytest.mark.parametrize("value", [0, 7, np.int32(3), np.int64(2**40)])
def test_whole_numbers_pass_as_ints(value):
    got = _checks.check_whole_number(n=value, at_least=0)
    assert type(got) is int
    assert got == value


@pytest.mark.parametrize("value", [2.5, 2.0, np.float32(2), "2", None, True, [2]])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(TypeError, match=r"^n must be a whole number; got .*\("):
        _checks.check_whole_number(n=value)


def test_a_whole_number_below_its_bound_is_refused():
    with pytest.raises(ValueError, match=r"^n must be at least 1; got 0"):
        _checks.check_whole_number(n=0, at_least=1)


@pytest.mark.parametrize("value", [0, -1.5, np.float32(2.5), np.float16(1), 10**30])
def test_numbers_pass_as_floats(value):
    got = _checks.check_number(x=value)
    assert type(got) is float
    assert got == float(value)


@pytest.mark.parametrize("value", ["0.1", None, True, 1j, [0.1]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match=r"^x must be a number; got .*\("):
        _checks.check_number(x=value)


@pytest.mark.parametrize(
    ("value", "bounds", "says"),
    [
        (math.nan, {}, "must be finite; got nan"),
        (math.nan, {"finite": False}, "must be a number; got nan"),
        (math.inf, {}, "must be finite; got inf"),
        (-1, {"at_least": 0}, "must be at least 0; got -1"),
        (0, {"above": 0}, "must be above 0; got 0"),
        (1.0, {"below": 1}, "must be below 1; got 1.0"),
    ],
)
def test_a_number_out_of_bounds_is_refused(value, bounds, says):
    with pytest.raises(ValueError, match=re.escape(f"x {says}")):
        _checks.check_number(x=value, **bounds)


def test_infinity_passes_where_it_may():
    assert _checks.check_number(x=math.inf, finite=False) == math.inf


@pytest.mark.parametrize("value", [True, False, np.bool_(True)])
def test_flags_pass(value):
    assert _checks.check_flag(average=value) is bool(value)


@pytest.mark.parametrize("value", ["no", 1, 0, None])
def test_what_is_no_flag_is_refused(value):
    with pytest.raises(TypeError, match=r"^average must be True or False; got"):
        _checks.check_flag(average=value)


def test_functions_pass_and_the_rest_is_refused():
    assert _checks.check_function(fn=len) is len
    with pytest.raises(TypeError, match=r"^fn must be a function; got None \(None"):
        _checks.check_function(fn=None)


def test_strings_pass_and_the_rest_is_refused():
    assert _checks.check_text(name="a") == "a"
    assert _checks.check_text(name="", empty=True) == ""
    with pytest.raises(ValueError, match=r"^name must not be empty"):
        _checks.check_text(name="")
    with pytest.raises(TypeError, match=r"^name must be a string; got 3 \(int\)"):
        _checks.check_text(name=3)


def test_values_of_a_kind_pass_and_the_rest_is_refused():
    assert _checks.check_kind(int, "a port", port=3) == 3
    assert _checks.check_kind(int | None, "a port", port=None) is None
    for kind in (int, int | None, list | dict):
        with pytest.raises(TypeError, match=r"^port must be a port; got '80' \(str\)"):
            _checks.check_kind(kind, "a port", port="80")


def test_lists_pass_and_the_rest_is_refused():
    assert _checks.check_list(steps=(1, 2)) == (1, 2)
    assert _checks.check_list(steps=[], empty=True) == []
    with pytest.raises(ValueError, match=r"^steps must hold at least one of steps"):
        _checks.check_list(steps=[], of="steps")
    for value in ("ab", None, 3, {1}):
        with pytest.raises(TypeError, match=r"^steps must be a list of steps; got"):
            _checks.check_list(steps=value, of="steps")


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(TypeError) as caught:
        _checks.check_number(x="a" * 1000)
    assert len(str(caught.value)) < 150


def test_checking_does_not_import_tensorflow():
    probe = "import sys, tw_core._checks; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


@pytest.fixture
def toy(monkeypatch):
    """A module with one name, ``here``, and one that cannot be loaded."""
    module = ModuleType("toy")

    def answer(name):
        if name != "here":
            raise AttributeError(f"No toy attribute {name}")
        return 1

    module.__dir__ = lambda: ["here", "broken"]
    module.__getattr__ = _checks.refusing_unknown("toy", answer)
    monkeypatch.setitem(sys.modules, "toy", module)
    return module


def test_an_unknown_name_is_refused_as_python_does_it(toy):
    assert toy.here == 1
    with pytest.raises(
        AttributeError, match=r"^module 'toy' has no attribute 'her'$"
    ) as got:
        _ = toy.her
    assert (got.value.name, got.value.obj) == ("her", toy)


def test_a_traceback_suggests_the_name_that_was_meant():
    # Only the interpreter itself does it; the module traceback learnt it in 3.12.
    command = [sys.executable, "-c", "import tw_core; tw_core.placemen"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith(
        "AttributeError: module 'tw_core' has no attribute 'placemen'. "
        "Did you mean: 'placement'?\n"
    )
    assert "lazy_loader" not in done.stderr


def test_what_a_public_name_lacks_while_it_is_loaded_is_said(toy):
    with pytest.raises(AttributeError, match=r"^No toy attribute broken$"):
        _ = toy.broken

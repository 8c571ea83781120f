"""Checks of arguments: what passes, and how the rest is refused."""

import math
import re
import subprocess
import sys
from functools import partial
from types import ModuleType

import numpy as np
import pytest

import tw_core
from tw_core import _checks, internal


def test_the_names_are_not_in_the_front():
    assert internal.check_flag is _checks.check_flag
    assert not hasattr(tw_core, "check_flag")
    with pytest.raises(AttributeError, match=r"tw_core\.internal.* 'chek_flag'"):
        _ = internal.chek_flag


WHOLE, NUMBER, FLAG = (
    _checks.check_whole_number,
    _checks.check_number,
    _checks.check_flag,
)
FUNCTION, TEXT, LIST = _checks.check_function, _checks.check_text, _checks.check_list
PORT = partial(_checks.check_kind, int, "a port")
PASS = [
    *((partial(WHOLE, at_least=0), n) for n in (0, 7, np.int32(3), np.int64(2**40))),
    *((NUMBER, x) for x in (0, -1.5, np.float32(2.5), np.float16(1), 2**100)),
    (partial(NUMBER, finite=False), math.inf),
    *((FLAG, flag) for flag in (True, False, np.bool_(True))),
    *((FUNCTION, len), (TEXT, "a"), (partial(TEXT, empty=True), "")),
    *((PORT, 3), (partial(_checks.check_kind, int | None, "a port"), None)),
    *((LIST, (1, 2)), (partial(LIST, empty=True), [])),
]


def test_what_is_wanted_passes_as_pythons_own():
    for check, value in PASS:
        got = check(it=value)
        assert got == value
        assert not isinstance(got, np.generic)
    assert type(NUMBER(it=3)) is float


REFUSED = [
    *((WHOLE, v, "a whole number; got") for v in (2.5, 2.0, np.float32(2), "2", None)),
    *((WHOLE, value, "a whole number; got") for value in (True, [2])),
    (partial(WHOLE, at_least=1), 0, "at least 1; got 0"),
    *((NUMBER, v, "a number; got") for v in ("0.1", None, True, 1j, [0.1])),
    (NUMBER, math.nan, "finite; got nan"),
    (partial(NUMBER, finite=False), math.nan, "a number; got nan"),
    (NUMBER, math.inf, "finite; got inf"),
    (partial(NUMBER, at_least=0), -1, "at least 0; got -1"),
    (partial(NUMBER, above=0), 0, "above 0; got 0"),
    (partial(NUMBER, below=1), 1.0, "below 1; got 1.0"),
    *((FLAG, v, "True or False; got") for v in ("no", 1, 0, None)),
    (FUNCTION, None, "a function; got None (None"),
    (TEXT, "", "not be empty"),
    (TEXT, 3, "a string; got 3 (int)"),
    (PORT, "80", "a port; got '80' (str)"),
    (partial(_checks.check_kind, int | None, "a port"), "80", "a port; got '80' (str)"),
    (partial(LIST, of="steps"), [], "be a non-empty list of steps; got []."),
    *((partial(LIST, of="steps"), v, "a list of steps; got") for v in ("a", None, {1})),
]


@pytest.mark.parametrize(("check", "value", "says"), REFUSED)
def test_the_rest_is_refused_by_name(check, value, says):
    with pytest.raises(
        (TypeError, ValueError), match=rf"^it must (be )?{re.escape(says)}"
    ):
        check(it=value)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(TypeError) as caught:
        NUMBER(x="a" * 1000)
    assert len(str(caught.value)) < 150


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
    with pytest.raises(AttributeError, match=r"^module 'toy' has no .* 'her'$") as got:
        _ = toy.her
    assert (got.value.name, got.value.obj) == ("her", toy)
    with pytest.raises(AttributeError, match=r"^No toy attribute broken$"):
        _ = toy.broken  # what it lacks while it is loaded is said


def test_a_traceback_suggests_the_name_that_was_meant():
    # Only the interpreter itself does it; the module traceback learnt it in 3.12.
    command = [sys.executable, "-c", "import tw_core; tw_core.placemen"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith(
        "AttributeError: module 'tw_core' has no attribute 'placemen'. "
        "Did you mean: 'placement'?\n"
    )
    assert "lazy_loader" not in done.stderr

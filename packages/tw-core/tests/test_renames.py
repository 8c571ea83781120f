"""Old names go on working, and say at the caller's line what to use."""

import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import tensorflow as tf

import tw_core.renames
from tw_core.checks import named_caller
from tw_core.modes import without_autograph
from tw_core.renames import (
    answer_renamed,
    renamed_arguments,
    renamed_attribute,
    takes_caller,
)


@renamed_arguments(epoch="incarnation")
def run(step, incarnation=0, *, limit=None):
    """Returns what it was called with."""
    return step, incarnation, limit


@renamed_arguments(timeout_ms=("timeout_s", lambda ms: ms / 1000))
@without_autograph
def wait(*, timeout_s=None):
    """Returns what it was called with."""
    return timeout_s


@takes_caller
@without_autograph
def check(value):
    """Returns who checks."""
    return named_caller("check")


class Status:
    incarnation = 3
    epoch = renamed_attribute("incarnation")


@pytest.fixture
def toy(monkeypatch):
    """A module with one name, ``here``, which answers old names."""
    module = ModuleType("toy")
    names = {"here": 1}

    def answer(name):
        if name not in names:
            raise AttributeError(f"No toy attribute {name}")
        return names[name]

    module.__dir__ = lambda: [*names, "broken"]
    module.__getattr__ = answer_renamed("toy", {"decode": "json.loads"}, answer)
    monkeypatch.setitem(sys.modules, "toy", module)
    return module


def warned(match):
    return pytest.warns(DeprecationWarning, match=match)


def test_an_old_name_of_a_module_gives_the_new_object(toy):
    with warned(r"^toy.decode is deprecated .* in 0.4; use json.loads.$") as caught:
        assert toy.decode("[1]") == [1]
    assert caught[0].filename == __file__


def test_other_names_of_a_module_are_as_before(toy):
    assert toy.here == 1


def test_an_unknown_name_is_refused_as_python_does_it(toy):
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


def test_an_old_argument_is_taken_for_the_new_one():
    with warned(
        r"^run\(epoch=...\) is deprecated .* use run\(incarnation=...\)"
    ) as got:
        assert run(1, epoch=2, limit=3) == (1, 2, 3)
    assert got[0].filename == __file__


def test_new_arguments_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(1, incarnation=2) == (1, 2, None)


@pytest.mark.parametrize(("args", "kwargs"), [((1, 2), {}), ((1,), {"incarnation": 2})])
def test_an_argument_given_by_both_names_is_refused(args, kwargs):
    with warned("epoch"), pytest.raises(TypeError, match="both incarnation and epoch"):
        run(*args, epoch=3, **kwargs)


def test_a_value_of_other_units_is_converted():
    says = r"^wait\(timeout_ms=...\) is deprecated .* use wait\(timeout_s=...\)"
    with warned(says) as caught:
        assert wait(timeout_ms=1500) == 1.5
    assert caught[0].filename == __file__
    with warned("timeout_ms"), pytest.raises(TypeError, match="both timeout_s and"):
        wait(timeout_ms=1500, timeout_s=2)


def test_caller_lends_its_name():
    says = r"^check\(caller=...\) is deprecated .* use with tw_core.checks.naming"
    with warned(says) as caught:
        assert check(1, caller="mine") == "mine"
    assert caught[0].filename == __file__
    assert check(1) == "check"


@pytest.mark.parametrize(("caller", "error"), [(None, TypeError), ("", ValueError)])
def test_a_caller_without_a_name_is_refused(caller, error):
    with warned("caller"), pytest.raises(error, match=r"^check: caller must"):
        check(1, caller=caller)


def test_autograph_does_not_rewrite_what_takes_old_arguments():
    files = []

    @renamed_arguments(old="new")
    @takes_caller
    @without_autograph
    def asked(new=0):
        files.extend(Path(frame.filename) for frame in traceback.extract_stack())

    tf.function(lambda: asked())()
    assert files.count(Path(tw_core.renames.__file__)) == 2


def test_an_old_attribute_reads_the_new_one():
    with warned(r"^Status.epoch is deprecated .* use Status.incarnation") as caught:
        assert Status().epoch == 3
    assert caught[0].filename == __file__
    assert Status.epoch.__doc__ == "Old name of ``incarnation``."

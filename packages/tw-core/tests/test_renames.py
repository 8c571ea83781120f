"""Old names go on working, and say at the caller's line what to use."""

import warnings
from types import SimpleNamespace

import pytest

from tw_core.renames import answer_renamed, renamed_arguments, renamed_attribute


@renamed_arguments(epoch="incarnation")
def run(step, incarnation=0, *, limit=None):
    """Returns what it was called with."""
    return step, incarnation, limit


class Status:
    incarnation = 3
    epoch = renamed_attribute("incarnation")


def unknown(name):
    raise AttributeError(name)


def warned(match):
    return pytest.warns(DeprecationWarning, match=match)


def test_an_old_name_of_a_module_gives_the_new_object():
    old = answer_renamed("mine", {"decode": "json.loads"}, unknown)
    with warned(r"^mine.decode is deprecated .* in 0.3; use json.loads.$") as caught:
        assert old("decode")("[1]") == [1]
    assert caught[0].filename == __file__


def test_other_names_of_a_module_are_as_before():
    names = SimpleNamespace(here=1)
    answer = answer_renamed("mine", {"decode": "json.loads"}, names.__getattribute__)
    assert answer("here") == 1
    with pytest.raises(AttributeError, match="lost"):
        answer("lost")


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


def test_an_old_attribute_reads_the_new_one():
    with warned(r"^Status.epoch is deprecated .* use Status.incarnation") as caught:
        assert Status().epoch == 3
    assert caught[0].filename == __file__
    assert Status.epoch.__doc__ == "Old name of ``incarnation``."

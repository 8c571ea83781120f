"""Old names and arguments work for one version, and say what to use instead."""

from importlib import import_module

import pytest
import tensorflow as tf

import tw_core
from tw_core._renamed import NAMES  # the table itself
from tw_core.devices import check_devices
from tw_core.gradients import check_grad_list


@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_old_name_gives_the_object_at_its_new_home(name):
    home = NAMES[name].rpartition(".")[0]
    with pytest.warns(DeprecationWarning, match=rf"tw_core\.{name} .*; use {home}"):
        found = getattr(tw_core, name)
    assert found is getattr(import_module(home), name)


def test_an_old_name_can_be_imported_and_the_warning_names_the_line():
    with pytest.warns(DeprecationWarning) as caught:
        from tw_core import check_grad_list as found
    assert found is check_grad_list
    assert caught[0].filename == __file__


def test_no_old_name_is_a_public_one():
    assert not set(NAMES) & set(tw_core.__all__)
    assert not set(NAMES) & set(dir(tw_core))


@pytest.mark.parametrize("check", [check_grad_list, check_devices])
def test_the_argument_caller_opens_the_error_and_warns(check):
    says = rf"{check.__name__}\(caller=\.\.\.\) is deprecated .*tw_core\.checks\.naming"
    with (
        pytest.warns(DeprecationWarning, match=says) as caught,
        pytest.raises((TypeError, ValueError), match=r"^asker: "),
    ):
        check(["nonsense"], caller="asker")
    assert caught[0].filename == __file__


def test_the_argument_caller_lets_pass_what_is_right():
    pairs = [[(tf.zeros([2]), tf.Variable(tf.zeros([2])))]]
    with pytest.warns(DeprecationWarning):
        check_grad_list(pairs, caller="asker", allow_none=False)

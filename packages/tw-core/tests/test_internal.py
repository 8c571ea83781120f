"""The names that the packages on top need of tw-core."""

import subprocess
import sys

import pytest

import tw_core
from tw_core import internal


def test_a_name_that_was_loaded_is_not_in_the_front():
    assert internal.check_flag is not None
    assert not hasattr(tw_core, "check_flag")


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'chek_flag'") as caught:
        _ = internal.chek_flag
    assert "tw_core.internal" in str(caught.value)


def test_what_needs_no_tensorflow_does_not_import_it():
    probe = (
        "import sys, tw_core._checks; "
        "from tw_core.internal import CallThread, Recorder, check_flag; "
        "sys.exit('tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)

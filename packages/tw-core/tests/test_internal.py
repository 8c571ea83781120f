"""The names that the packages on top need of tw-core."""

import subprocess
import sys

import pytest

from tw_core import internal


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

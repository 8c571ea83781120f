"""Fakes eight devices, and has hypothesis try the same examples in every run."""

import os
import sys
from pathlib import Path

from hypothesis import settings

from tw_core.testing import start_logical_cpus

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
os.environ["TW_REPORTS"] = ""  # Errors carry their reports, and write no files.
start_logical_cpus()
# What several tests of a part share lies beside them.
sys.path.insert(0, str(Path(__file__).parent / "tower_model"))

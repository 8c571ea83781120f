"""Fakes eight devices."""

import sys
from pathlib import Path

from tw_core.testing import start_logical_cpus

start_logical_cpus()
# What several tests of a part share lies beside them.
sys.path.insert(0, str(Path(__file__).parent / "tower_model"))

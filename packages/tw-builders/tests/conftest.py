"""Fakes eight devices."""

import sys
from pathlib import Path

from tw_core.testing import start_logical_cpus

start_logical_cpus()

# For the modules beside this one that several tests import.
sys.path.insert(0, str(Path(__file__).parent))

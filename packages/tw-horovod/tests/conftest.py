"""Clusters and groups of ranks, whose processes end with the test."""

import sys
from pathlib import Path

from harness.fixtures import make_cluster, make_ranks, processes  # noqa: F401

# For the programs of tests, which the tasks import too.
sys.path.insert(0, str(Path(__file__).parent))

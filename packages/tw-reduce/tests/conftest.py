"""Fakes eight devices."""

import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tw_core.testing import start_logical_cpus

sys.path.insert(0, str(Path(__file__).parent))  # for reduce_given.py
start_logical_cpus()


@pytest.fixture
def graph():
    """A fresh graph, the default one during the test."""
    with tf.Graph().as_default() as graph:
        yield graph

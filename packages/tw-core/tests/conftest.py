"""Eight logical CPUs."""

import pytest
import tensorflow as tf

from tw_core.devices import available_devices
from tw_core.testing import start_logical_cpus

# Asking first shows that the question leaves TensorFlow unstarted: it could not
# be given another number of CPUs afterwards.
available_devices()
start_logical_cpus()


@pytest.fixture
def graph():
    """A fresh session graph, the default one during the test."""
    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture
def reference_variables():
    """The variables before resource variables, as ``disable_v2_behavior`` has them."""
    tf.compat.v1.disable_resource_variables()
    yield
    tf.compat.v1.enable_resource_variables()

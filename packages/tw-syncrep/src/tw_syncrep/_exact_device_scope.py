"""A device that holds whatever device the caller is in."""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """Places ops on ``device`` alone, not on a mixture with the caller's.

    A worker's device function would otherwise complete the name of a parameter
    server with, say, the worker's GPU. An empty name leaves the choice to the
    session.
    """
    with tf.device(None), tf.device(device):
        yield


@contextmanager
def apart_from_the_caller() -> Iterator[None]:
    """Builds ops that inherit neither device nor control inputs.

    What the chief runs must not drag along what the caller hung on its training
    op, such as the ops of ``UPDATE_OPS``: they would run a second time.
    """
    with tf.control_dependencies(None), tf.device(None):
        yield

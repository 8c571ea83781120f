"""Scopes that override the caller's, rather than merge with them."""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf


@contextmanager
def exact_device_scope(device: str) -> Iterator[None]:
    """Places ops on ``device`` alone, whatever device scope the caller is in.

    A worker's device function would otherwise complete the name of a parameter
    server with, say, the worker's GPU. An empty name leaves the choice to the
    session.
    """
    with tf.device(None), tf.device(device):
        yield


@contextmanager
def detached_scope() -> Iterator[None]:
    """Builds ops that inherit neither the device nor the control inputs of the caller.

    The chief's ops must not depend on the control inputs of the caller's training
    op, such as the ops of ``UPDATE_OPS``: these would run a second time.
    """
    with tf.control_dependencies(None), tf.device(None):
        yield

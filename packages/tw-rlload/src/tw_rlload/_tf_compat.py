"""Access to private TensorFlow APIs, confined to this module."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2


def make_callable(
    sess: tf.compat.v1.Session,
    tensors: Sequence[tf.Tensor],
    operations: Sequence[tf.Operation],
    feeds: Sequence[tf.Tensor],
) -> Callable[..., list[Any]]:
    """Makes a callable of one array per feed that processes fetches and feeds once.

    The public ``Session.make_callable`` does so only without feeds; with feeds it
    calls ``Session.run``. The callable does not cast: arrays must have the right dtype.
    """
    options = config_pb2.CallableOptions()
    options.fetch.extend(tensor.name for tensor in tensors)
    options.target.extend(operation.name for operation in operations)
    options.feed.extend(tensor.name for tensor in feeds)
    made: Callable[..., list[Any]] = sess._make_callable_from_options(options)
    return made

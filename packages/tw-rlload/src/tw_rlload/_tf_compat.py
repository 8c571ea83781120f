"""Access to private TensorFlow APIs, confined to this module."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2


def inside_branch_or_loop() -> bool:
    """Returns whether new ops are inside a branch, a loop or a function.

    TensorFlow's older control flow, which ``disable_v2_behavior()`` restores, has no
    function bodies, and its contexts have no public name.
    """
    graph = tf.compat.v1.get_default_graph()
    return bool(tf.inside_function() or graph._get_control_flow_context())


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

"""What TensorFlow has no public function for; nothing else imports it."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2


def capture(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """Brings an outer graph's tensor into the graph of a function body.

    Args:
      graph: the default graph inside the body of e.g. ``tf.while_loop``.
      tensor: of the graph outside; resource handles too.

    Returns:
      The tensor that stands for it inside; the same one each time.
    """
    return graph.capture(tensor)


def inside_branch_or_loop() -> bool:
    """Says whether ops made now run only where a branch, loop or function does.

    TensorFlow's older control flow, which ``disable_v2_behavior()`` brings back, has
    no function bodies; its contexts have no public name.
    """
    graph = tf.compat.v1.get_default_graph()
    return bool(tf.inside_function() or graph._get_control_flow_context())


def make_callable(
    sess: tf.compat.v1.Session,
    tensors: Sequence[tf.Tensor],
    operations: Sequence[tf.Operation],
    feeds: Sequence[tf.Tensor],
) -> Callable[..., list[Any]]:
    """Makes a callable that looks at its fetches and feeds once.

    The public ``Session.make_callable`` does so without feeds only; with feeds it
    calls ``Session.run``.

    Args:
      sess: where to run.
      tensors: what to return, in order.
      operations: what to run besides.
      feeds: what to feed, in order, as arrays of the right dtype.

    Returns:
      A callable of one array per feed, which returns a list of arrays.
    """
    options = config_pb2.CallableOptions()
    options.fetch.extend(tensor.name for tensor in tensors)
    options.target.extend(operation.name for operation in operations)
    options.feed.extend(tensor.name for tensor in feeds)
    made: Callable[..., list[Any]] = sess._make_callable_from_options(options)
    return made

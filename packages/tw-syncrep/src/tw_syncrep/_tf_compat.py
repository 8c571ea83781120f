"""TensorFlow's private modules, wrapped; no other module imports these."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

try:
    from tensorflow.python.client.session import _FetchHandler
except ImportError:  # TensorFlow may move it with any version.
    _FetchHandler = None

_NEEDED = ("_closed", "_extend_graph", "_call_tf_sessionrun", "_do_call")


def can_prepare(session: tf.compat.v1.Session) -> bool:
    """Returns whether this TensorFlow supports ``PreparedCall``."""
    return _FetchHandler is not None and all(hasattr(session, n) for n in _NEEDED)


class PreparedCall:
    """Fetches and feeds that are resolved once, rather than at each ``Session.run``.

    The public ``Session.make_callable`` prepares fetches without feeds only; with
    feeds it calls ``Session.run``.
    """

    def __init__(
        self, graph: tf.Graph, fetches: Any, feeds: Sequence[tf.Tensor]
    ) -> None:
        """Resolves fetches, in any structure but not fed, and [N] feeds."""
        self._handler = _FetchHandler(graph, fetches, {})
        self._outputs = [tensor._as_tf_output() for tensor in self._handler.fetches()]
        self._targets = [operation._c_op for operation in self._handler.targets()]
        self._feeds = [tensor._as_tf_output() for tensor in feeds]

    def run(self, session: tf.compat.v1.Session, values: Sequence[np.ndarray]) -> Any:
        """Runs them like ``Session.run``; values have the feeds' dtypes and shapes."""
        if session._closed:
            raise RuntimeError("Attempted to use a closed Session.")
        session._extend_graph()
        fed = dict(zip(self._feeds, values, strict=True))
        call = session._call_tf_sessionrun
        results = session._do_call(call, None, fed, self._outputs, self._targets, None)
        return self._handler.build_results(session, results)

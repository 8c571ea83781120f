"""TensorFlow's private modules, wrapped; no other module imports these."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def explain_unavailable(explain: Callable[[str], str]) -> None:
    """Passes the message of each ``tf.errors.UnavailableError`` through a function.

    This applies from now on, in the whole process. TensorFlow makes its errors in C++,
    from the classes registered when it was imported, so no other can replace them.
    """
    begin = tf.errors.UnavailableError.__init__

    @functools.wraps(begin)
    def begin_explained(
        self: Any, node_def: Any, op: Any, message: str, *args: Any
    ) -> None:
        begin(self, node_def, op, explain(message), *args)

    tf.errors.UnavailableError.__init__ = begin_explained

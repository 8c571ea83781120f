"""Keeping AutoGraph out of library code that is called in a ``tf.function``.

AutoGraph rewrites every function that it meets on the way, ours too: without
need, and for seconds in the first trace. What is marked runs as it is written.
A function that calls users' functions must not be marked, since AutoGraph would
then leave those alone as well.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import tensorflow as tf

from tw_core.checks import check_function

_F = TypeVar("_F", bound=Callable[..., object])


def without_autograph(function: _F) -> _F:
    """Marks a function that AutoGraph shall not convert, nor what it calls.

    Args:
      function: library code; it calls no function of the user's.

    Returns:
      A function that does the same.

    Raises:
      TypeError: ``function`` cannot be called.
    """
    check_function("without_autograph", function=function)
    return cast(_F, tf.autograph.experimental.do_not_convert(function))

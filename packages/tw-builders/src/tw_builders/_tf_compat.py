"""What is needed of TensorFlow's optimizers beyond their public methods."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def create_v1_slots(optimizer: Any, variables: Sequence[tf.Variable]) -> None:
    """Makes the state of a ``tf.compat.v1.train`` optimizer before it is used.

    TensorFlow makes it in the first ``apply_gradients``; inside a
    ``tf.function`` that means tracing the function twice. The method is the one
    that subclasses of the v1 class override; other optimizers are left alone.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        optimizer._create_slots(variables)

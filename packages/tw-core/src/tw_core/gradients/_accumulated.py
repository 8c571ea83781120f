"""Sums of gradients in variables, to which every kind of accumulation adds.

The caller chooses the device, and in session graphs the order of effects.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf


def make_sums(specs: Sequence[Any], *, name: str = "sum_{}") -> list[tf.Variable]:
    """Makes [N] sums of zeros, for specs or whatever else has a shape and a dtype."""
    made = []
    with tf.init_scope():
        for n, spec in enumerate(specs):
            zeros = partial(tf.zeros, spec.shape, spec.dtype)
            made.append(tf.Variable(zeros, trainable=False, name=name.format(n)))
    return made


def add_to_sums(
    sums: Sequence[tf.Variable],
    grads: Sequence[Any],
    factor: tf.Tensor | None = None,
) -> list[Any]:
    """Adds gradients, dense or sparse, times a factor, and returns the operations.

    Dense gradients have the dtype of their sum, or are cast to it.
    """
    minus = None if factor is None else -factor
    return [_add(own, grad, minus) for own, grad in zip(sums, grads, strict=True)]


def clear_sums(sums: Sequence[tf.Variable]) -> list[Any]:
    """Sets sums to zero, and returns the operations."""
    return [own.assign(tf.zeros_like(own), read_value=False) for own in sums]


def _add(own: tf.Variable, grad: Any, minus_factor: tf.Tensor | None) -> Any:
    if minus_factor is not None:  # of the widest dtype of all gradients
        minus_factor = tf.cast(minus_factor, own.dtype)
    if isinstance(grad, tf.IndexedSlices):
        rows = tf.cast(grad.values, own.dtype)
        return tf.raw_ops.ResourceScatterAdd(
            resource=own.handle,
            indices=grad.indices,
            updates=rows if minus_factor is None else rows * -minus_factor,
        )
    grad = tf.cast(grad, own.dtype)
    if minus_factor is None:
        return own.assign_add(grad, read_value=False)
    # A descent step with a negative rate: it multiplies and adds in one pass, where a
    # separate product would write and read the model once more.
    return tf.raw_ops.ResourceApplyGradientDescent(
        var=own.handle, alpha=minus_factor, delta=grad
    )

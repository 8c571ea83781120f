"""Gradients that are dense or sparse, treated alike.

A sparse gradient, a ``tf.IndexedSlices``, has its numbers in ``values``: one row per
lookup, so that an index may occur many times.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tw_core.gradients._duplicate_rows import sum_duplicate_rows
from tw_core.modes import without_autograph


def values_of(grad: Any) -> tf.Tensor:
    """Returns the values of an ``IndexedSlices``, or the dense tensor itself."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


@without_autograph
def map_values(fn: Callable[[tf.Tensor], tf.Tensor], grad: Any) -> Any:
    """Replaces a dense gradient, or the values of a sparse one, by ``fn`` of them.

    Args:
      fn: takes and returns a tensor; must keep the number of rows of a sparse one.
      grad: a tensor or an ``IndexedSlices``.

    Returns:
      A gradient of the same kind; of a sparse one, with the same indices and
      ``dense_shape``.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return fn(grad)
    return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)


@without_autograph
def scale(grad: Any, factor: float | tf.Tensor | None) -> Any:
    """Multiplies a gradient, dense or sparse, by a scalar.

    Args:
      grad: a tensor or an ``IndexedSlices``.
      factor: a number or a scalar tensor, rounded to the gradient's dtype before the
        product; None leaves the gradient as it is.

    Returns:
      A gradient of the same kind and dtype.

    Raises:
      TypeError: an integer gradient.
    """
    if factor is None:
        return grad
    dtype = values_of(grad).dtype
    if not (dtype.is_floating or dtype.is_complex):
        raise TypeError(
            f"scale: grad must be floating, or most of its products would be rounded "
            f"to 0; got {dtype.name}. Cast it first."
        )
    # A number straight to the dtype: by way of float32, 1/3 is not 1/3 in float64.
    is_tensor = tf.is_tensor(factor)
    own = tf.cast(factor, dtype) if is_tensor else tf.constant(factor, dtype)
    return map_values(lambda values: values * own, grad)


@without_autograph
def with_unique_rows(grad: Any) -> Any:
    """Adds the rows of a sparse gradient that share an index.

    Args:
      grad: a tensor, an ``IndexedSlices``, or None.

    Returns:
      As ``sum_duplicate_rows`` for an ``IndexedSlices``; anything else as it is.
    """
    return sum_duplicate_rows(grad) if isinstance(grad, tf.IndexedSlices) else grad

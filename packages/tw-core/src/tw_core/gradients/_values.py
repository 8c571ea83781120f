"""Uniform handling of dense and sparse gradients.

A sparse gradient, a ``tf.IndexedSlices``, has its numbers in ``values``: one row per
lookup, so that an index may occur many times; a sum over towers has the rows of all of
them. The gradient it represents is the sum of the rows that share an index. Code that
uses the rows for anything but that sum must add them first: a norm, a square (Adam's
second moment), an assignment to rows. The optimizers of ``tf.compat.v1.train`` do so
themselves; in Keras 3, RMSprop, Adam, AdamW, Adadelta, Adagrad, Adamax, Nadam, Ftrl,
Adafactor and Lamb do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from tw_core._checks import check_function
from tw_core._modes import compiles_with_xla, without_autograph

_F = TypeVar("_F", bound=Callable[..., Any])


def values_of(grad: Any) -> tf.Tensor:
    """Returns the values of an ``IndexedSlices``, or the dense tensor itself."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


@without_autograph
def map_values(fn: Callable[[tf.Tensor], tf.Tensor], grad: Any) -> Any:
    """Applies ``fn`` to a dense gradient, or to the values of a sparse one.

    Args:
      fn: takes and returns a tensor; must keep the number of rows of a sparse one.
      grad: a tensor or an ``IndexedSlices``.

    Returns:
      A gradient of the same kind; a sparse one keeps its indices and
      ``dense_shape``.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return fn(grad)
    return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)


def elementwise(reducer: _F) -> _F:
    """Marks a reducer whose results depend on the elements at one position each.

    Only such a reducer is given gradients joined into packs, and before they are
    unscaled; any other gets them in their variables' shapes, and unscaled. A sum is
    elementwise; a reducer that uses a norm or a ranking is not.

    Args:
      reducer: [K][N] -> [K][N], a function or an object with attributes.

    Returns:
      The same, marked by an attribute ``elementwise``.

    Raises:
      TypeError: ``reducer`` is not a function.
    """
    check_function(reducer=reducer)
    reducer.elementwise = True  # type: ignore[attr-defined]
    return reducer


def is_elementwise(reducer: Any) -> bool:
    """Returns whether a reducer, or one in a ``functools.partial``, is marked."""
    while isinstance(reducer, partial) and not hasattr(reducer, "elementwise"):
        reducer = reducer.func
    return bool(getattr(reducer, "elementwise", False))


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
    dtype = grad.dtype
    if not (dtype.is_floating or dtype.is_complex):
        raise TypeError(
            f"scale: grad must be floating, or most of its products would be rounded "
            f"to 0; got {dtype.name}. Cast it first."
        )
    own = scalar_of(factor, dtype)
    if not isinstance(grad, tf.IndexedSlices):
        return grad * own
    return tf.IndexedSlices(grad.values * own, grad.indices, grad.dense_shape)


def scalar_of(number: Any, dtype: tf.DType) -> tf.Tensor:
    """Converts a number or a scalar tensor."""
    # A number is converted directly: via float32, 1/3 would not be 1/3 in float64.
    make = tf.cast if tf.is_tensor(number) else tf.constant
    return make(number, dtype)


@without_autograph
def sum_duplicate_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds rows with the same index, so that each index occurs once.

    Args:
      slices: ``[R, ...]`` values of a numeric dtype, ``[R]`` indices in any
        order; ``dense_shape`` may be None.

    Returns:
      The same gradient with one row per distinct index, in the order of first
      occurrence, on the device of the values. In a ``jit_compile=True``
      function, which needs a static number of rows, R rows in the order of
      indices: the spare ones are zeros at the smallest index.

    Raises:
      TypeError: something other than an ``IndexedSlices``.
    """
    if not isinstance(slices, tf.IndexedSlices):
        raise TypeError(
            f"sum_duplicate_rows: slices must be a tf.IndexedSlices; got "
            f"{type(slices).__name__}. Use a dense gradient as it is."
        )
    with tf.name_scope("sum_duplicate_rows"), tf.device(slices.values.device):
        if compiles_with_xla():
            values, indices = _sum_sorted(slices)
        else:
            indices, rows = tf.unique(slices.indices)
            values = tf.math.unsorted_segment_sum(slices.values, rows, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


@without_autograph
def with_unique_rows(grad: Any) -> Any:
    """Adds the rows of a sparse gradient that share an index.

    Args:
      grad: a tensor, an ``IndexedSlices``, or None.

    Returns:
      For an ``IndexedSlices``, the result of ``sum_duplicate_rows``; anything else
      unchanged.
    """
    return sum_duplicate_rows(grad) if isinstance(grad, tf.IndexedSlices) else grad


def _sum_sorted(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    # XLA refuses Unique, since the size of its result depends on the data.
    order = tf.argsort(slices.indices, stable=True)
    ordered = tf.gather(slices.indices, order)
    previous = tf.roll(ordered, 1, axis=0)
    # Not `!=`, which compares identities where version 2 behaviour is off.
    is_new = tf.cast(tf.not_equal(ordered, previous), tf.int32)
    rows = tf.cumsum(is_new) - is_new[:1]
    num_rows = tf.size(order)
    values = tf.gather(slices.values, order)
    values = tf.math.unsorted_segment_sum(values, rows, num_rows)
    indices = tf.math.unsorted_segment_max(ordered, rows, num_rows)
    return values, tf.maximum(indices, tf.reduce_min(ordered))

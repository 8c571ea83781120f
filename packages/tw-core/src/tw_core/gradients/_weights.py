"""The weights of towers, ranks and micro-batches in a mean.

Weights are expressed in a unit. If all are equal, the unit is their value: they are
exactly 1, and products with them keep every bit. Otherwise it is a power of two, so
that whole numbers, such as row counts, stay exact.
"""

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import tensorflow as tf

from tw_core._checks import check_list
from tw_core._modes import without_autograph
from tw_core.gradients._values import scalar_of


def check_weight(weight: Any) -> None:
    """Refuses anything that cannot weight gradients in a mean.

    Args:
      weight: such as a number of rows; the values of tensors are not checked.

    Raises:
      TypeError: neither a real number nor a scalar tensor of a real dtype.
      ValueError: a number that is below 0 or not finite.
    """
    if not _is_weight(weight):
        raise TypeError(
            "weight must be a real number or a scalar tensor, such as the number of "
            f"rows; got {weight!r:.80}."
        )
    if isinstance(weight, Real) and not 0 <= float(weight) < float("inf"):
        raise ValueError(f"weight must be finite and 0 or more; got {weight}.")


def check_weights(
    weights: Sequence[Any] | None,
    *,
    num_towers: int | None = None,
    average: bool = True,
) -> None:
    """Refuses anything but towers' weights.

    Args:
      weights: the user's argument; None is accepted.
      num_towers: how many there must be; None if that is not known yet.
      average: whether a mean is taken, since only a mean uses weights.

    Raises:
      TypeError: not a list; an item that is neither a real number nor a scalar tensor.
      ValueError: a number that is negative or not finite; not one weight per
        tower; no mean is taken.
    """
    if weights is None:
        return
    if not average:
        raise ValueError(
            "weights apply to a mean only; pass average=True, or leave them out for a "
            "sum."
        )
    check_list(weights=weights, of="numbers or scalar tensors, one per tower")
    others = [
        f"tower {k}: {weight!r:.80}"
        for k, weight in enumerate(weights)
        if not _is_weight(weight)
    ]
    if others:
        raise TypeError(
            "weights must hold real numbers or scalar tensors, one per tower; got "
            f"{', '.join(others)}. Pass e.g. the number of its rows."
        )
    low = [
        f"tower {k}: {weight}"
        for k, weight in enumerate(weights)
        if isinstance(weight, Real) and not 0 <= float(weight) < float("inf")
    ]
    if low:
        raise ValueError(f"weights must be finite and 0 or more; got {', '.join(low)}.")
    if num_towers is not None and len(weights) != num_towers:
        raise ValueError(
            f"weights must be one per tower ({num_towers}); got {len(weights)}."
        )


def shares_of(weights: Sequence[Any]) -> list[tf.Tensor]:
    """Returns each tower's weight as a multiple of their unit.

    Args:
      weights: [K] numbers or scalar tensors that ``check_weights`` accepts.

    Returns:
      [K] float64 scalars, on the current device; 0 if all weights are.
    """
    own = [scalar_of(weight, tf.float64) for weight in weights]
    unit = unit_of(own)
    return [tf.math.divide_no_nan(weight, unit) for weight in own]


def unit_of(weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the unit of float64 weights: their value if equal, else a power of two.

    That power is the largest that is not above the largest weight.
    """
    joined = tf.stack(list(weights))
    largest = tf.reduce_max(joined)
    are_equal = tf.equal(tf.reduce_min(joined), largest)
    return tf.where(are_equal, largest, power_of_two(largest))


@without_autograph
def weigh(grad: Any, weight: float | tf.Tensor) -> Any:
    """Multiplies a gradient, dense or sparse, by its weight in a mean.

    Args:
      grad: a tensor or an ``IndexedSlices``, of a floating dtype.
      weight: a number or a scalar tensor.

    Returns:
      A gradient of the same kind and dtype. Where the weight is 0 it is 0, even for
      NaN, which is the gradient of a mean over no rows.
    """
    is_sparse = isinstance(grad, tf.IndexedSlices)
    values = grad.values if is_sparse else grad
    # In float16 a weight above 65504 is infinite.
    is_narrow = values.dtype in (tf.float16, tf.bfloat16)
    dtype = tf.float32 if is_narrow else values.dtype
    product = tf.math.multiply_no_nan(tf.cast(values, dtype), scalar_of(weight, dtype))
    product = tf.cast(product, values.dtype)
    if not is_sparse:
        return product
    return tf.IndexedSlices(product, grad.indices, grad.dense_shape)


def weight_dtype(tensors: Iterable[Any]) -> tf.DType:
    """Returns the dtype in which gradients' weights and their sums are computed.

    Args:
      tensors: gradients, variables, or anything else with a dtype.

    Returns:
      float64 if any of them is, else float32.
    """
    wide = ("float64", "complex128")
    dtypes = {tf.as_dtype(own.dtype).name for own in tensors}
    return tf.float64 if dtypes.intersection(wide) else tf.float32


def power_of_two(number: tf.Tensor) -> tf.Tensor:
    """Returns the largest power of two that is not above a number.

    Args:
      number: float64 of any shape, 0 or more and finite.

    Returns:
      float64 of its shape; 0 for 0.
    """
    exponent = tf.constant(0x7FF << 52, tf.int64)  # masks a float64's mantissa
    bits = tf.bitwise.bitwise_and(tf.bitcast(number, tf.int64), exponent)
    return tf.bitcast(bits, tf.float64)


def _is_weight(weight: Any) -> bool:
    if tf.is_tensor(weight):
        is_real = weight.dtype.is_floating or weight.dtype.is_integer
        return bool(is_real and weight.shape.is_compatible_with([]))
    return isinstance(weight, Real) and not isinstance(weight, bool)

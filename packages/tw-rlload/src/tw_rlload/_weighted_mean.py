"""The mean over rows, some of which are pads and do not count."""

import tensorflow as tf

from tw_core.modes import without_autograph


@without_autograph
def weighted_mean(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Averages values by weights; 0 where no weight is above 0.

    A tower's loss under ``remainder="pad"`` is such a mean, so that pads do not count
    and a tower with only pads returns 0 rather than NaN.

    Args:
      values: [N], floating.
      weights: [N], 1 for rows of the batch and 0 for pads; of any dtype.

    Returns:
      A scalar of the dtype of ``values``: sum(values * weights) / sum(weights).

    Raises:
      TypeError: not tensors of numbers, or values that are not floating.
      ValueError: shapes that differ, or whose rank is not 1.
    """
    values, weights = _tensor("values", values), _tensor("weights", weights)
    if not values.dtype.is_floating:
        raise TypeError(
            f"weighted_mean: values must be floating; got {values.dtype.name}."
        )
    shape = values.shape
    if not (
        shape.is_compatible_with([None]) and shape.is_compatible_with(weights.shape)
    ):
        raise ValueError(
            "weighted_mean: values and weights must both have shape [rows]; got "
            f"{shape} and {weights.shape}. Average over other axes first."
        )
    with tf.name_scope("weighted_mean"):
        weights = tf.cast(weights, values.dtype)
        total = tf.reduce_sum(values * weights)
        return tf.math.divide_no_nan(total, tf.reduce_sum(weights))


def _tensor(name: str, value: object) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"weighted_mean: {name} must be a tensor; got {value!r:.80} "
            f"({type(value).__name__})."
        ) from error
    if not (
        tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    ):
        raise TypeError(
            f"weighted_mean: {name} must be numbers; got {tensor.dtype.name}."
        )
    return tensor

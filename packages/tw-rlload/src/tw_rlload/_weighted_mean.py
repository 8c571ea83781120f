"""The mean of rows that count and rows that do not."""

import tensorflow as tf

from tw_core import without_autograph


@without_autograph
def weighted_mean(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Averages values by weights; 0 where no weight is above 0.

    A tower's loss under ``tail="pad"`` is such a mean, so that pads do not count
    and a tower with nothing but pads gives 0 and not NaN.

    Args:
      values: [N], floating.
      weights: [N], 1 for rows of the batch and 0 for pads; of any dtype.

    Returns:
      A scalar of the dtype of ``values``: sum(values * weights) / sum(weights).
    """
    values = tf.convert_to_tensor(values)
    weights = tf.cast(weights, values.dtype)
    total = tf.reduce_sum(values * weights)
    return tf.math.divide_no_nan(total, tf.reduce_sum(weights))

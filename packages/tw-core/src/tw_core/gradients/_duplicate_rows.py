"""Adding the rows of an ``IndexedSlices`` that share an index.

The gradient of a lookup has one row per lookup, and the sum of several towers'
gradients has the rows of all of them, so that an index may occur many times.
The gradient it stands for is the sum of these rows. Whoever uses the rows for
anything but that sum must add them first: a norm, a square (Adam's second
moment), an assignment to rows. The optimizers of ``tf.compat.v1.train`` do so
by themselves; of Keras 3, RMSprop, Adam, AdamW, Adadelta, Adagrad, Adamax,
Nadam, Ftrl, Adafactor and Lamb do not.
"""

import tensorflow as tf

from tw_core.modes import compiles_with_xla, without_autograph


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
      TypeError: something else than an ``IndexedSlices``.
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
            values, indices = _sum_unique(slices)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _sum_unique(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    indices, rows = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, rows, tf.size(indices))
    return values, indices


def _sum_sorted(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    # XLA refuses Unique, whose result has as many elements as the data say.
    order = tf.argsort(slices.indices, stable=True)
    ordered = tf.gather(slices.indices, order)
    previous = tf.roll(ordered, 1, axis=0)
    # Not `!=`, which compares objects where version 2 behaviour is off.
    is_new = tf.cast(tf.not_equal(ordered, previous), tf.int32)
    rows = tf.cumsum(is_new) - is_new[:1]
    num_rows = tf.size(order)
    values = tf.gather(slices.values, order)
    values = tf.math.unsorted_segment_sum(values, rows, num_rows)
    indices = tf.math.unsorted_segment_max(ordered, rows, num_rows)
    return values, tf.maximum(indices, tf.reduce_min(ordered))

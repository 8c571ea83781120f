"""How many micro-batches make a group: an int, or a scalar checked when it runs."""

from typing import Any, TypeAlias

import tensorflow as tf

Multiplier: TypeAlias = int | tf.Tensor | tf.Variable


def check_multiplier(
    value: Any, *, caller: str
) -> int | tf.Tensor | tf.Variable | None:
    """Refuses what cannot count micro-batches.

    Args:
      value: None, a whole number, or a numeric scalar tensor or variable.
      caller: who asks; opens the message.

    Returns:
      None where nothing is to be accumulated (None, 1), else the int or tensor.

    Raises:
      ValueError: a number below 1 or not whole, or a tensor that is no scalar.
      TypeError: no number.
    """
    if value is None:
        return None
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        _check_tensor(value, caller)
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        whole = getattr(value, "item", lambda: None)()  # a NumPy number
        if isinstance(whole, bool) or not isinstance(whole, int | float):
            raise TypeError(
                f"{caller}: minibatch_multiplier is a whole number of micro-batches or "
                f"a numeric scalar tensor; got {value!r}."
            )
        value = whole
    if not (value >= 1 and float(value).is_integer()):
        raise ValueError(
            f"{caller}: minibatch_multiplier counts micro-batches, a whole number of 1 "
            f"or more; got {value}."
        )
    return None if value == 1 else int(value)


def count_of(multiplier: Multiplier, *, caller: str) -> tf.Tensor:
    """Returns the multiplier as an int64 scalar, checked where it is a tensor.

    Running it raises ``tf.errors.InvalidArgumentError`` for a value below 1 or not
    whole.
    """
    if isinstance(multiplier, int):
        return tf.constant(multiplier, tf.int64)
    value = tf.convert_to_tensor(multiplier)
    count = tf.cast(value, tf.int64)
    good = tf.logical_and(count >= 1, tf.equal(tf.cast(count, value.dtype), value))
    message = (
        f"{caller}: minibatch_multiplier counts micro-batches, a whole number of 1 or "
        "more; got:"
    )
    check = tf.debugging.Assert(good, [message, value])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(count)


def _check_tensor(value: Any, caller: str) -> None:
    dtype = tf.as_dtype(value.dtype)
    if not (dtype.is_integer or dtype.is_floating):
        raise TypeError(
            f"{caller}: minibatch_multiplier must be numeric; got a tensor of dtype "
            f"{dtype.name}."
        )
    if not tf.TensorShape(value.shape).is_compatible_with([]):
        raise ValueError(
            f"{caller}: minibatch_multiplier must be a scalar; got a tensor of shape "
            f"{value.shape}."
        )

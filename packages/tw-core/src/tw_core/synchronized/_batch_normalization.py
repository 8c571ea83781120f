"""Batch normalisation with the moments of the whole batch, for ``get_variable`` code.

Towers may hold different numbers of rows, or none: sums and counts are added, and means
are taken afterwards. As in ``tf.nn.moments`` the variance is computed from the
differences from the mean, which loses no digits where a mean is large.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core._checks import check_flag, check_number, check_whole_number
from tw_core._modes import orders_effects, without_autograph
from tw_core.synchronized._places import current_place
from tw_core.synchronized._sums import sum_over_towers


@without_autograph
def moments_over_towers(
    x: tf.Tensor, axes: int | Sequence[int], *, keepdims: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes mean and variance over all towers' ``x``, as ``tf.nn.moments`` would.

    Args:
      x: floating point, of the same shape in all towers outside of ``axes``; may be
        empty in a tower.
      axes: the axes to reduce.
      keepdims: whether reduced axes stay, with length 1.

    Returns:
      Mean and variance (divided by the number of elements), in the dtype of ``x``;
      float16 and bfloat16 are computed in float32. Both are 0 where ``x`` is empty in
      all towers.

    Raises:
      TypeError: ``x`` is not of floating point; ``axes`` are not whole numbers.
      ValueError: ``x`` is of unknown rank, or ``axes`` out of its range.
      RuntimeError: as ``sum_over_towers``.
    """
    x = tf.convert_to_tensor(x)
    check_flag(keepdims=keepdims)
    reduced = _checked_axes(x, axes)
    with tf.name_scope("moments_over_towers"):
        mean, variance = _moments(_at_least_float32(x), reduced, keepdims)
        return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)


@without_autograph
def batch_normalization(
    inputs: tf.Tensor,
    *,
    training: bool,
    axis: int = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    beta_initializer: Any = None,
    gamma_initializer: Any = None,
    beta_regularizer: Callable[[tf.Tensor], tf.Tensor] | None = None,
    gamma_regularizer: Callable[[tf.Tensor], tf.Tensor] | None = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
    mean_name: str = "moving_mean",
    variance_name: str = "moving_variance",
) -> tf.Tensor:
    """Normalises by the moments of the whole batch of all towers.

    Takes the arguments and makes the variables of
    ``tf.compat.v1.layers.batch_normalization``, in a session graph or, under a
    ``VariableStore``, in a ``tf.function``. For the names of tensorpack's ``BatchNorm``
    pass ``mean_name="mean/EMA"``, ``variance_name="variance/EMA"``, ``momentum=0.9``
    and ``epsilon=1e-5``.

    In a session graph the updates of the moving averages are in ``UPDATE_OPS``. Where
    towers share an average, one of them updates it; separate averages stay equal.

    Args:
      inputs: floating point, of known rank.
      training: whether to normalise by the batch, rather than by the moving averages.
      axis: the channels' axis, of known length.
      momentum: share that a moving average keeps per step, at least 0 and below 1.
      epsilon: added to the variance.
      center: whether to add ``beta``.
      scale: whether to multiply by ``gamma``.
      beta_initializer: zeros by default.
      gamma_initializer: ones by default.
      beta_regularizer: as for ``get_variable``.
      gamma_regularizer: as for ``get_variable``.
      trainable: whether ``beta`` and ``gamma`` are trainable.
      name: of the variable scope; ``"batch_normalization"`` made unique by default.
      reuse: of the variable scope.
      mean_name: name of the moving mean's variable.
      variance_name: name of the variable of the moving variance, an average of the
        batch's variance (divided by the number of elements).

    Returns:
      Normalised ``inputs``, in their dtype; float16 and bfloat16 are computed in
      float32, the dtype of their variables.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: an ``axis`` out of range or of unknown length, or numbers out of
        bounds.
      RuntimeError: as ``sum_over_towers``.
    """
    check_number(momentum=momentum, at_least=0, below=1)
    check_number(epsilon=epsilon, at_least=0)
    check_flag(training=training)
    inputs = tf.convert_to_tensor(inputs)
    (channels,) = _checked_axes(inputs, check_whole_number(axis=axis))
    length = tf.compat.dimension_value(inputs.shape[channels])
    if length is None:
        raise ValueError(
            f"The length of axis {axis} must be known; got {inputs.shape}."
        )
    x = _at_least_float32(inputs)
    v1 = tf.compat.v1
    with v1.variable_scope(name, "batch_normalization", [inputs], reuse=reuse):

        def make(name: str, initial: Any, regularizer: Any, learns: bool) -> Any:
            return v1.get_variable(
                name,
                [length],
                x.dtype,
                initial,
                regularizer=regularizer,
                trainable=learns,
            )

        zeros, ones = v1.zeros_initializer(), v1.ones_initializer()
        beta = gamma = None
        if scale:
            initial = gamma_initializer or ones
            gamma = make("gamma", initial, gamma_regularizer, trainable)
        if center:
            initial = beta_initializer or zeros
            beta = make("beta", initial, beta_regularizer, trainable)
        moving = make(mean_name, zeros, None, False)
        moving_variance = make(variance_name, ones, None, False)
        if training:
            reduced = [n for n in range(x.shape.rank) if n != channels]
            mean, variance = _moments(x, reduced, False)
            _update(moving, mean, momentum)
            _update(moving_variance, variance, momentum)
        else:
            mean, variance = tf.identity(moving), tf.identity(moving_variance)
        shape = [length if n == channels else 1 for n in range(x.shape.rank)]
        factors = (mean, variance, beta, gamma)
        y = tf.nn.batch_normalization(
            x, *[None if v is None else tf.reshape(v, shape) for v in factors], epsilon
        )
        return tf.cast(y, inputs.dtype)


def _moments(
    x: tf.Tensor, axes: Sequence[int], keepdims: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), x.dtype)
    total, count = sum_over_towers((tf.reduce_sum(x, axes, keepdims=True), count))
    mean = tf.math.divide_no_nan(total, count)
    # The differences from the mean add up to 0, and so would the mean's gradient.
    squares = tf.math.squared_difference(x, tf.stop_gradient(mean))
    squares = sum_over_towers(tf.reduce_sum(squares, axes, keepdims=True))
    variance = tf.math.divide_no_nan(squares, count)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def _update(moving: tf.Variable, value: tf.Tensor, momentum: float) -> None:
    place = current_place()
    if place is not None and not place.joined.updates(moving, place):
        return
    moved = moving * momentum + tf.stop_gradient(value) * (1 - momentum)
    update = moving.assign(moved)
    if not orders_effects():
        tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.UPDATE_OPS, update)


def _at_least_float32(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


def _checked_axes(x: tf.Tensor, axes: int | Sequence[int]) -> list[int]:
    if not x.dtype.is_floating:
        raise TypeError(f"The tensor must be of a floating dtype; got {x.dtype.name}.")
    if x.shape.rank is None:
        raise ValueError("The rank of the tensor must be known.")
    several = axes if isinstance(axes, list | tuple) else [axes]
    whole = [check_whole_number(axes=axis) for axis in several]
    if any(not -x.shape.rank <= axis < x.shape.rank for axis in whole):
        raise ValueError(f"axes must be within the rank {x.shape.rank}; got {axes}.")
    return sorted({axis % x.shape.rank for axis in whole})

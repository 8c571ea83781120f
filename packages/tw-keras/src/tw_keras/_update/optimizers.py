"""What an update asks of Keras's optimizers: accumulation, and the loss's scale."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tw_core.internal import tf_variable
from tw_keras._keras_compat import accumulates, counter_of
from tw_keras._update.gradients import NARROW

_SCALING = keras.optimizers.LossScaleOptimizer


def scale_of(optimizer: Any) -> Any:
    """Returns the loss's scale, float64, which may change; None without one."""
    if isinstance(optimizer, _SCALING):
        return tf.cast(tf_variable(optimizer.dynamic_scale), tf.float64)
    factor = getattr(optimizer, "loss_scale_factor", None)
    return None if factor is None else tf.constant(factor, tf.float64)


def scales_losses(optimizer: Any) -> bool:
    """Returns whether a Keras optimizer expects gradients of scaled losses."""
    has_own = type(optimizer).scale_loss is not keras.optimizers.Optimizer.scale_loss
    return has_own or optimizer.loss_scale_factor is not None


def may_accumulate(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Returns whether towers can accumulate gradients in an optimizer's place."""
    # Their sum times a scale may overflow where one gradient does not.
    is_narrow = any(tf.as_dtype(own.dtype).name in NARROW for own in variables)
    overwrites = any(getattr(v, "overwrite_with_gradient", False) for v in variables)
    is_known = accumulates(optimizer) and not overwrites
    return is_known and not (is_narrow and scales_losses(optimizer))


def is_update_due(inner: Any) -> tf.Tensor:
    """Returns whether the next call of an optimizer's ``apply`` updates."""
    count = tf_variable(counter_of(inner)).read_value() + 1
    return tf.equal(count % inner.gradient_accumulation_steps, 0)

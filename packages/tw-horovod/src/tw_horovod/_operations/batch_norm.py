"""Batch normalization with the statistics of all ranks' batches."""

from typing import Any

import tensorflow as tf

from tw_horovod._keras import IS_KERAS_2, keras
from tw_horovod._operations.ops import allreduce
from tw_horovod._state.group import find_group


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization whose means and variances are those of all ranks' batches.

    Ranks have equal weight, however many rows they have.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        """Takes the arguments of Keras's layer.

        Args:
          fused: False.
          **kwargs: of ``keras.layers.BatchNormalization``.

        Raises:
          ValueError: ``fused`` is not False.
        """
        if fused is not False:
            raise ValueError(
                f"SyncBatchNormalization: fused must be False; got {fused!r}."
            )
        super().__init__(**({"fused": False} if IS_KERAS_2 else {}), **kwargs)
        self.supports_jit = False

    def _moments(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(*args, **kwargs)
        if find_group().size == 1:
            return mean, variance
        # Var[x] = E[(x - a)^2] - E[x - a]^2 for any a that all ranks share; one near
        # the mean loses the fewest digits.
        near = tf.stop_gradient(tf.cast(self.moving_mean, mean.dtype))
        if IS_KERAS_2:  # It may keep dimensions of size 1.
            near = tf.reshape(near, tf.shape(mean))
        brought = tf.stack([mean - near, variance + tf.square(mean - near)])
        offset, square = tf.unstack(allreduce(brought))
        return offset + near, square - tf.square(offset)

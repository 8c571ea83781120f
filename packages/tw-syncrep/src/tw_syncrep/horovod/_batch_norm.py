"""Batch normalization by the statistics of all ranks' batches."""

from typing import Any

import keras
import tensorflow as tf

from tw_syncrep.horovod._basics import find_group
from tw_syncrep.horovod._ops import allreduce


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization whose means and variances are those of all ranks' batches.

    Ranks count the same, however many rows they have.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        """Takes what Keras's layer does.

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
        super().__init__(**kwargs)
        self.supports_jit = False

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if find_group("SyncBatchNormalization").size == 1:
            return mean, variance
        # Var[x] = E[(x - a)^2] - E[x - a]^2 for any a that ranks have in common; one
        # that is near the mean leaves most digits.
        near = tf.stop_gradient(tf.cast(self.moving_mean, mean.dtype))
        brought = tf.stack([mean - near, variance + tf.square(mean - near)])
        offset, square = tf.unstack(allreduce(brought))
        return offset + near, square - tf.square(offset)

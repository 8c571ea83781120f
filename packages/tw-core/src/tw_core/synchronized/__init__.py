"""Sums over towers inside a model, and batch normalisation by such sums.

Inside a tower a tensor is summed over all towers of the build, and gradients go back
through the sum. Under ``synchronized_layers`` these sums serve layers that were written
for ``tf.distribute``, such as Keras's ``BatchNormalization(synchronized=True)``.
"""

from tw_core.synchronized._batch_normalization import (
    batch_normalization,
    moments_over_towers,
)
from tw_core.synchronized._layers import synchronized_layers
from tw_core.synchronized._sums import joined_towers, sum_over_towers

__all__ = [
    "batch_normalization",
    "joined_towers",
    "moments_over_towers",
    "sum_over_towers",
    "synchronized_layers",
]

"""Sums and rows of all towers inside a model, and batch normalisation by such sums.

Inside a tower a tensor is summed over all towers of the build, or the rows of all are
joined, and gradients go back through both. Under ``synchronized_layers`` they serve
layers that were written for ``tf.distribute``, such as Keras's
``BatchNormalization(synchronized=True)``.
"""

from tw_core.synchronized._batch_normalization import (
    batch_normalization,
    moments_over_towers,
)
from tw_core.synchronized._joined import joined_towers
from tw_core.synchronized._layers import synchronized_layers
from tw_core.synchronized._sums import gather, sum_over_towers

__all__ = [
    "batch_normalization",
    "gather",
    "joined_towers",
    "moments_over_towers",
    "sum_over_towers",
    "synchronized_layers",
]

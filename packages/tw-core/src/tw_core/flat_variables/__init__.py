"""Many small variables as one, which is read, reduced and updated as a whole.

A small variable's cost is its ops in every tower, not its bytes. A model's variables
below a threshold can be packed into one flat variable per dtype and device: they are
read once, their gradients are one tensor, and one update applies it. The model reads
views; checkpoints keep the variables' own names and shapes.

The optimizer must treat each element by itself: one of those of Keras, tf_keras or
``tf.compat.v1.train`` that are known to, or one whose class sets ``elementwise = True``
because it uses no norm, ranking or name of a variable. Others are refused.
"""

from tw_core.flat_variables._flat_variables import (
    FlatVariables,
    flat_variable_of,
)
from tw_core.flat_variables._layout import DEFAULT_BELOW_BYTES
from tw_core.flat_variables._model import FlatModel, flatten
from tw_core.flat_variables._packing import pack_gradients
from tw_core.flat_variables._session.slots import slots_like_parts

__all__ = [
    "DEFAULT_BELOW_BYTES",
    "FlatModel",
    "FlatVariables",
    "flat_variable_of",
    "flatten",
    "pack_gradients",
    "slots_like_parts",
]

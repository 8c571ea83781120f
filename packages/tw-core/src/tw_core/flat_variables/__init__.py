"""Many small variables as one, for reading, reducing and applying at once.

A small variable costs its ops and not its bytes, in every tower. Those of a model that
are below a threshold can lie in one flat variable per dtype and device: they are read
once, their gradients arrive as one, and one update applies it. The model reads views;
checkpoints have the variables' own names and shapes.
"""

from tw_core.flat_variables._flat_variables import (
    FlatVariables,
    flat_variable_of,
)
from tw_core.flat_variables._layout import DEFAULT_BELOW_BYTES
from tw_core.flat_variables._model import FlatModel, flatten
from tw_core.flat_variables._packing import pack_gradients
from tw_core.flat_variables._plain_optimizer import plain_optimizer
from tw_core.flat_variables._slots import slots_like_parts

__all__ = [
    "DEFAULT_BELOW_BYTES",
    "FlatModel",
    "FlatVariables",
    "flat_variable_of",
    "flatten",
    "pack_gradients",
    "plain_optimizer",
    "slots_like_parts",
]

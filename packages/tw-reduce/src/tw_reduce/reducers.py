"""Types, checks and keys for code that writes reducers or shares collectives.

A reducer adds: it takes [K][N] tensors, a list per tower, and returns [K][N] sums.
``mean(reducer)`` returns means instead.
"""

from tw_core.internal import check_weights, elementwise, shares_of, unit_of
from tw_reduce._checks import check_adds, check_tower_tensors
from tw_reduce._reducer import Tensorlike, TowerTensors, check_reduced
from tw_reduce._sums.rendezvous import CollectiveKeys

__all__ = [
    "CollectiveKeys",
    "Tensorlike",
    "TowerTensors",
    "check_adds",
    "check_reduced",
    "check_tower_tensors",
    "check_weights",
    "elementwise",
    "shares_of",
    "unit_of",
]

"""Tower contexts, as in tensorpack, and handles on the towers built in them.

A model function asks ``get_current_tower_context()`` which tower it builds.
"""

from tw_core._records.collections import freeze_collections, leave_no_summaries
from tw_core.contexts._base import BaseTowerContext, get_current_tower_context
from tw_core.contexts._handles import TowerFunc, TowerHandle, TowerHandles
from tw_core.contexts._training_and_inference import (
    PredictTowerContext,
    TowerContext,
    TrainTowerContext,
)

__all__ = [
    "BaseTowerContext",
    "PredictTowerContext",
    "TowerContext",
    "TowerFunc",
    "TowerHandle",
    "TowerHandles",
    "TrainTowerContext",
    "freeze_collections",
    "get_current_tower_context",
    "leave_no_summaries",
]

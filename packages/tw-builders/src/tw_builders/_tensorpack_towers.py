"""Towers that treat tensorpack's collection of moving averages as summaries.

``add_moving_summary`` of tensorpack 0.11 keeps the ops that maintain the averages
in a collection of their own, from which a callback runs them in every training
step. The op of an inference tower would want that tower's inputs there.
"""

from typing import Self

import tensorflow as tf

import tw_core
from tw_core import freeze_collections

MOVING_SUMMARY_OPS_KEY = "MOVING_SUMMARY_OPS"


class TrainTowerContext(tw_core.TrainTowerContext):
    """``tw_core.TrainTowerContext``, and ``MOVING_SUMMARY_OPS`` is the main tower's.

    Entering it freezes that collection in the graph, for all towers to come.
    """

    def __init__(
        self, ns_name: str, vs_name: str = "", index: int = 0, total: int = 1
    ) -> None:
        super().__init__(ns_name, vs_name=vs_name, index=index, total=total)

    def __enter__(self) -> Self:
        """Enters the tower; raises as ``tw_core.TrainTowerContext`` does."""
        _freeze_moving_summaries()
        return super().__enter__()


class PredictTowerContext(tw_core.PredictTowerContext):
    """``tw_core.PredictTowerContext``, which leaves no ``MOVING_SUMMARY_OPS`` either.

    Entering it freezes that collection in the graph, for all towers to come.
    """

    def __init__(self, ns_name: str, vs_name: str = "") -> None:
        super().__init__(ns_name, vs_name=vs_name)

    def __enter__(self) -> Self:
        """Enters the tower; raises as ``tw_core.PredictTowerContext`` does."""
        _freeze_moving_summaries()
        return super().__enter__()


def TowerContext(
    tower_name: str, is_training: bool, vs_name: str = ""
) -> tw_core.BaseTowerContext:
    """Makes the only training tower, or an inference tower.

    Args:
      tower_name: name scope; may be empty.
      is_training: which of the two.
      vs_name: as in ``tw_core.TrainTowerContext`` and ``PredictTowerContext``.
    """
    kind = TrainTowerContext if is_training else PredictTowerContext
    return kind(tower_name, vs_name=vs_name)


def _freeze_moving_summaries() -> None:
    if not tf.executing_eagerly():  # where no tower can be entered, as that one says
        freeze_collections(MOVING_SUMMARY_OPS_KEY)

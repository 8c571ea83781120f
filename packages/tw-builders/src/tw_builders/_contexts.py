"""Towers that treat tensorpack's collection of moving averages as summaries.

``add_moving_summary`` of tensorpack 0.11 keeps the ops that maintain the averages
in a collection of their own, from which a callback runs them in every training
step. The op of an inference tower would want that tower's inputs there.
"""

from typing import Self

import tensorflow as tf

import tw_core.contexts

MOVING_SUMMARY_OPS_KEY = "MOVING_SUMMARY_OPS"


class TrainTowerContext(tw_core.contexts.TrainTowerContext):
    """A training tower; only the main one adds to ``MOVING_SUMMARY_OPS``.

    As ``tw_core.contexts.TrainTowerContext`` otherwise. Entering it freezes that
    collection in the graph, for all later towers.
    """

    def __init__(
        self, ns_name: str, vs_name: str = "", index: int = 0, total: int = 1
    ) -> None:
        super().__init__(ns_name, vs_name=vs_name, index=index, total=total)

    def __enter__(self) -> Self:
        """Enters the tower; raises as its base class does."""
        _freeze_moving_summaries()
        return super().__enter__()


class PredictTowerContext(tw_core.contexts.PredictTowerContext):
    """An inference tower, which adds nothing to ``MOVING_SUMMARY_OPS`` either.

    As ``tw_core.contexts.PredictTowerContext`` otherwise. Entering it freezes that
    collection in the graph, for all later towers.
    """

    def __init__(self, ns_name: str, vs_name: str = "") -> None:
        super().__init__(ns_name, vs_name=vs_name)

    def __enter__(self) -> Self:
        """Enters the tower; raises as its base class does."""
        _freeze_moving_summaries()
        return super().__enter__()


def TowerContext(
    tower_name: str, is_training: bool, vs_name: str = ""
) -> tw_core.contexts.BaseTowerContext:
    """Makes the only training tower, or an inference tower.

    Args:
      tower_name: name scope; may be empty.
      is_training: which of the two.
      vs_name: as in ``tw_core.contexts.TrainTowerContext`` and ``PredictTowerContext``.
    """
    kind = TrainTowerContext if is_training else PredictTowerContext
    return kind(tower_name, vs_name=vs_name)


def _freeze_moving_summaries() -> None:
    if not tf.executing_eagerly():  # where no tower can be entered, as that one says
        tw_core.contexts.freeze_collections(MOVING_SUMMARY_OPS_KEY)

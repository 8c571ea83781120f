"""Training and inference towers, as a model function sees them.

As in tensorpack (``tensorpack/tfutils/tower.py``), a model function asks
``get_current_tower_context()`` whether it builds for training and whether it is
the first to build; the owner of the variables and the frozen collections follow
from that.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tw_core._checks import check_flag, check_whole_number
from tw_core._records.collections import frozen_keys
from tw_core._records.origins import build_in_progress, record_scope
from tw_core.contexts._base import BaseTowerContext


class TrainTowerContext(BaseTowerContext):
    """A training tower.

    Tower 0 makes the variables. The other towers reuse them, or make their own
    below ``vs_name``; they add no summaries, and nothing to the collections that
    ``freeze_collections`` names.

    Attributes:
      index: 0 for the main tower.
      total: number of training towers.
    """

    is_training = True

    def __init__(
        self, ns_name: str, vs_name: str = "", index: int = 0, total: int = 1
    ) -> None:
        """Describes training tower ``index`` of ``total``.

        Args:
          ns_name: name scope, such as ``"tower1"``.
          vs_name: variable scope of own variables; empty to share tower 0's.
          index: 0 <= index < total.
          total: number of training towers.

        Raises:
          ValueError: not 0 <= index < total, a variable scope is open, or own
            variables are requested under ``reuse=True``.
          TypeError: a name is not a string, or index or total is not a whole number.
        """
        super().__init__(ns_name, vs_name)
        check_whole_number(index=index)
        check_whole_number(total=total)
        if not 0 <= index < total:
            raise ValueError(
                f"{self}: index must be 0 or more and below total; got index={index}, "
                f"total={total}."
            )
        self.index = int(index)
        self.total = int(total)
        if not tf.executing_eagerly():
            self._check_current_scope()

    @property
    def is_main_training_tower(self) -> bool:
        """Whether this is tower 0."""
        return self.index == 0

    @property
    def has_own_variables(self) -> bool:
        """Whether the tower makes variables: tower 0, and towers with vs_name."""
        return self.is_main_training_tower or bool(self._vs_name)

    def _check_current_scope(self) -> None:
        scope = tf.compat.v1.get_variable_scope()
        if scope.name:
            raise ValueError(
                f"{self}: training towers belong at the top level; got the variable "
                f"scope {scope.name!r}. Leave that scope first."
            )
        if self.has_own_variables and scope.reuse is True:
            raise ValueError(
                f"{self}: makes its own variables, but the current variable scope "
                "has reuse=True. Leave that scope first."
            )

    def _owner_of_losses(self) -> Hashable:
        return build_in_progress(), self.index

    def _recording(self) -> AbstractContextManager[Any]:
        return record_scope(
            self.index, ns_name=self._name, vs_name=self._vs_name, total=self.total
        )

    def _reuse(self) -> bool | None:
        return None if self.has_own_variables else True

    def _frozen_keys(self, graph: tf.Graph) -> list[str]:
        return [] if self.is_main_training_tower else [*frozen_keys(graph)]


class PredictTowerContext(BaseTowerContext):
    """An inference tower: adds no summaries and no update ops.

    It also leaves unchanged the collections that ``freeze_collections`` names.
    Under ``tf.compat.v1.variable_scope(..., reuse=True)`` it uses the variables
    that training towers made; elsewhere it makes its own, as for export.
    """

    def __init__(self, ns_name: str, vs_name: str = "") -> None:
        """Describes an inference tower.

        Args:
          ns_name: name scope; may be empty.
          vs_name: variable scope of the training tower whose variables it
            uses; empty for tower 0's.

        Raises:
          ValueError: a ``vs_name`` without a ``ns_name``.
        """
        super().__init__(ns_name, vs_name)
        self._reuses_variables = False
        if not tf.executing_eagerly():
            self._check_current_scope()

    @property
    def is_main_training_tower(self) -> bool:
        """Always False."""
        return False

    @property
    def has_own_variables(self) -> bool:
        """Whether it is outside of ``reuse=True`` and ``AUTO_REUSE`` scopes."""
        return not self._reuses_variables

    def _check_current_scope(self) -> None:
        self._reuses_variables = bool(tf.compat.v1.get_variable_scope().reuse)

    def _frozen_keys(self, graph: tf.Graph) -> list[str]:
        return [*frozen_keys(graph), tf.compat.v1.GraphKeys.UPDATE_OPS]


def TowerContext(
    tower_name: str, is_training: bool, vs_name: str = ""
) -> BaseTowerContext:
    """Makes the only training tower, or an inference tower.

    Args:
      tower_name: name scope; may be empty.
      is_training: True for a training tower, False for an inference tower.
      vs_name: as in ``TrainTowerContext`` and ``PredictTowerContext``.

    Raises:
      TypeError: ``is_training`` is not a bool; otherwise as for the two.
    """
    check_flag(is_training=is_training)
    if is_training:
        return TrainTowerContext(tower_name, vs_name=vs_name)
    return PredictTowerContext(tower_name, vs_name=vs_name)

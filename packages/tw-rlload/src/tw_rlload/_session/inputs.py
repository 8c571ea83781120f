"""The rows of one step, sliced by what is fed: the inputs of ``optimize``."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core import Tower, map_towers
from tw_rlload._loading.buffers import Loaded
from tw_rlload._loading.load import WEIGHTS
from tw_rlload._loading.specs import ColumnSpec
from tw_rlload._loading.variables import DataVariables
from tw_rlload._training.slices import Cut, pick_branch, slice_rows


class StepInputs:
    """The towers' sliced rows in a session graph.

    Attributes:
      tensors: [K][C] on the towers' devices.
      has_weights: whether the last column tells which rows are no pads.
    """

    def __init__(
        self,
        towers: Sequence[Tower],
        specs: Sequence[ColumnSpec],
        variables: DataVariables,
    ) -> None:
        """Slices [stacks][K][C] variables of K towers and C specs."""
        self.has_weights = specs[-1] is WEIGHTS
        with tf.device("/cpu:0"):
            # One feed for four numbers, as every feed costs its time.
            self._fed = tf.compat.v1.placeholder(tf.int32, [4], "cut")
            first, count, length, stack = tf.unstack(self._fed)
        cut = Cut(first, count, length)

        def pick(tower: Tower) -> list[tf.Tensor]:
            mine = [stacked[tower.index] for stacked in variables]
            branches = [partial(slice_rows, columns, specs, cut) for columns in mine]
            return pick_branch(stack, branches)

        self.tensors = map_towers(pick, towers)

    def feeds(self, loaded: Loaded, first: int) -> dict[tf.Tensor, Any]:
        """Returns what to feed for the step that starts at sequence ``first``."""
        plan = loaded.plan
        count, length = plan.sequences_per_device_step, plan.sequence_length
        return {self._fed: (first, count, length, loaded.stack)}

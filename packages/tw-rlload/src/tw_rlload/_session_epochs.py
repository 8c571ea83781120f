"""Whole epochs in one session call: the step, copied into a loop.

The step was built once, outside, as ``optimize`` runs it. The loop's body holds
a copy of what lies between its inputs and its update.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_rlload._epoch_loop import LoopFeeds, LoopInputs, loop_over_steps
from tw_rlload._subgraph import copy_into_body, extract


class SessionEpochs:
    """A loop over steps in a session graph.

    Attributes:
      fetch: [T, M] float64, the scalars of T steps.
    """

    def __init__(
        self,
        inputs: LoopInputs,
        step_inputs: Sequence[Sequence[tf.Tensor]],
        operations: Sequence[tf.Operation],
        scalars: Sequence[tf.Tensor],
    ) -> None:
        """Copies the step into a loop.

        Args:
          inputs: picks the rows of a turn.
          step_inputs: [K][C], the tensors of the step that those replace.
          operations: to run in every turn; the train op among them.
          scalars: M of them, to bring out of every turn.
        """
        replaced = [tensor for tower in step_inputs for tensor in tower]
        targets = [*operations, *scalars]
        subgraph = extract(replaced, targets)

        def step(rows: list[list[tf.Tensor]]) -> tuple[list[Any], list[Any]]:
            flat = [tensor for tower in rows for tensor in tower]
            copies = copy_into_body(subgraph, flat, targets)
            return copies[: len(operations)], copies[len(operations) :]

        with tf.device("/cpu:0"), tf.name_scope("epochs"):
            self._placeholders = _placeholders()
            self.fetch = loop_over_steps(self._placeholders, inputs, step)

    def feeds(self, arrays: LoopFeeds) -> dict[tf.Tensor, Any]:
        """Returns what to feed so that ``fetch`` runs over these arrays."""
        return dict(zip(self._placeholders, arrays, strict=True))


def _placeholders() -> LoopFeeds:
    placeholder = tf.compat.v1.placeholder
    return LoopFeeds(
        steps=placeholder(tf.int32, [None], "steps"),
        sequences=placeholder(tf.int32, [None, None, None], "sequences"),
        shape=placeholder(tf.int32, [2], "shape"),
        source=placeholder(tf.int32, [], "source"),
    )

"""Whole epochs in one session call: the step, copied into a loop.

The step was built once, outside, as ``optimize`` runs it. The loop's body holds
a copy of what lies between its inputs and its update.
"""

from typing import Any

import tensorflow as tf

from tw_rlload._loading.buffers import Loaded
from tw_rlload._session.calls import SessionCalls
from tw_rlload._session.step import SessionStep
from tw_rlload._session.subgraph import copy_into_body, extract
from tw_rlload._session.tower_loss import loss_of, operations_of, scalars_of
from tw_rlload._training.loop import LoopFeeds, LoopInputs, loop_feeds, loop_over_steps
from tw_rlload._training.order import EpochOrder
from tw_rlload._training.progress import Packed
from tw_rlload._training.scalars import lay_out


class SessionEpochs:
    """A loop over steps in a session graph.

    Attributes:
      layout: what the scalars of a step are.
    """

    def __init__(
        self, step: SessionStep, losses: list[tf.Tensor], inputs: LoopInputs
    ) -> None:
        """Copies the step into a loop.

        Args:
          step: of all towers.
          losses: [K] scalars to report.
          inputs: picks the rows of a turn.
        """
        others = [scalars_of(fetches) for fetches in step.fetches]
        self.layout, scalars = lay_out(losses, step.weights, others)
        operations = [op for fetches in step.fetches for op in operations_of(fetches)]
        self._step, self._inputs = step, inputs
        with tf.device("/cpu:0"), tf.name_scope("epochs"):
            self._placeholders = _placeholders()
            self._fetch = self._loop([step.train_op, *operations], scalars)

    def run(
        self, calls: SessionCalls, sess: Any, loaded: Loaded, order: EpochOrder
    ) -> Packed:
        """Trains on whole epochs.

        Args:
          calls: keeps the callable.
          sess: session.
          loaded: the current batch.
          order: E epochs of S steps.

        Returns:
          [E * S, M] float64, the scalars of each step.
        """
        arrays = loop_feeds(loaded.plan, order, loaded.stack)
        own = dict(zip(self._placeholders, arrays, strict=True))
        feeds = {**self._step.own_feeds(), **own}
        packed: Packed = calls.run(sess, "epochs", self._fetch, feeds)
        return packed

    def _loop(
        self, operations: list[tf.Operation], scalars: list[tf.Tensor]
    ) -> tf.Tensor:
        replaced = [tensor for tower in self._step.inputs.tensors for tensor in tower]
        targets = [*operations, *scalars]
        subgraph = extract(replaced, targets)

        def step(rows: list[list[tf.Tensor]]) -> tuple[list[Any], list[Any]]:
            flat = [tensor for tower in rows for tensor in tower]
            copies = copy_into_body(subgraph, flat, targets)
            return copies[: len(operations)], copies[len(operations) :]

        return loop_over_steps(self._placeholders, self._inputs, step)


def build_epochs(step: SessionStep, inputs: LoopInputs) -> SessionEpochs | None:
    """Builds the loop; None where a tower shows no loss that could be reported.

    Args:
      step: of all towers.
      inputs: picks the rows of a turn.
    """
    losses = [loss_of(loss) for loss in step.losses]
    known = [loss for loss in losses if loss is not None]
    return SessionEpochs(step, known, inputs) if len(known) == len(losses) else None


def _placeholders() -> LoopFeeds:
    placeholder = tf.compat.v1.placeholder
    return LoopFeeds(
        steps=placeholder(tf.int32, [None], "steps"),
        sequences=placeholder(tf.int32, [None, None, None], "sequences"),
        shape=placeholder(tf.int32, [2], "shape"),
        source=placeholder(tf.int32, [], "source"),
    )

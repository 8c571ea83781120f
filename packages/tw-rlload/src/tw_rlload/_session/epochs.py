"""Whole epochs in one session call: the step, copied into a loop.

The step was built once, outside, as ``optimize`` runs it. The loop's body holds
a copy of what lies between its inputs and its update.
"""

from typing import Any

import tensorflow as tf

from tw_rlload._loading.plan import LoadPlan
from tw_rlload._session.losses import loss_of, operations_of, scalars_of
from tw_rlload._session.step import SessionStep
from tw_rlload._session.subgraph import make_copier
from tw_rlload._training.loop import (
    LOOP_SPECS,
    LoopFeeds,
    Pick,
    loop_feeds,
    loop_over_steps,
)
from tw_rlload._training.order import EpochOrder
from tw_rlload._training.result import EpochResult, Packed, lay_out, make_result


class SessionEpochs:
    """A loop over steps in a session graph."""

    def __init__(
        self, step: SessionStep, losses: list[tf.Tensor], picks: list[Pick]
    ) -> None:
        """Copies the step into a loop.

        Args:
          step: of all towers.
          losses: [K] scalars to report.
          picks: pick the rows of a turn.
        """
        others = [scalars_of(fetches) for fetches in step.fetches]
        self._layout, scalars = lay_out(losses, step.weights, others)
        operations = [op for fetches in step.fetches for op in operations_of(fetches)]
        self._step = step
        with tf.device("/cpu:0"), tf.name_scope("epochs"):
            placeholder = tf.compat.v1.placeholder
            self._placeholders = LoopFeeds(
                *(
                    placeholder(spec.dtype, spec.shape, name)
                    for name, spec in LOOP_SPECS._asdict().items()
                )
            )
            self._fetch = self._loop([step.train_op, *operations], scalars, picks)

    def request(
        self, plan: LoadPlan, buffer: int, order: EpochOrder
    ) -> tuple[tf.Tensor, dict[Any, Any]]:
        """Returns what to fetch and to feed to train on whole epochs.

        Args:
          plan: of the current batch.
          buffer: where that lies.
          order: E epochs of S steps.

        Returns:
          [E * S, M] float64, the scalars of each step; and the feeds.
        """
        arrays = loop_feeds(plan, order, buffer)
        own = dict(zip(self._placeholders, arrays, strict=True))
        return self._fetch, {**self._step.own_feeds(), **own}

    def result(self, packed: Packed, order: EpochOrder) -> EpochResult:
        """Reads the scalars of all steps."""
        return make_result(packed, self._layout, order)

    def _loop(
        self,
        operations: list[tf.Operation],
        scalars: list[tf.Tensor],
        picks: list[Pick],
    ) -> tf.Tensor:
        replaced = [tensor for tower in self._step.inputs for tensor in tower]
        copy = make_copier(replaced, [*operations, *scalars])

        def step(rows: list[list[tf.Tensor]]) -> tuple[list[Any], list[Any]]:
            copies = copy([tensor for tower in rows for tensor in tower])
            return copies[: len(operations)], copies[len(operations) :]

        return loop_over_steps(self._placeholders, picks, step)


def build_epochs(step: SessionStep, picks: list[Pick]) -> SessionEpochs | None:
    """Builds the loop; None where a tower shows no loss that could be reported."""
    losses = [loss_of(loss) for loss in step.losses]
    known = [loss for loss in losses if loss is not None]
    return SessionEpochs(step, known, picks) if len(known) == len(losses) else None

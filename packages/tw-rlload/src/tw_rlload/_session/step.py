"""The step that a session graph holds: every tower's loss, averaged, applied.

``optimize`` runs it as it is; ``run_epochs`` runs copies of it in a loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core import Tower
from tw_reduce import Reducer
from tw_rlload._loading.buffers import Loaded
from tw_rlload._session.calls import SessionCalls
from tw_rlload._session.inputs import StepInputs
from tw_rlload._session.losses import (
    BuiltLosses,
    build_losses,
    check_shared,
    sum_weights,
    with_weights,
)
from tw_rlload._session.tower_loss import feeds_of, fetches_of
from tw_rlload._training.gradients import combine_gradients

_NAME = "LocalSyncParallelOptimizer"


@dataclass(frozen=True)
class Update:
    """How the towers' gradients change the variables.

    Attributes:
      optimizer: applies them.
      reducer: [K][N] gradients to [K][N] means.
      grad_norm_clipping: bound of the means' global norm, or None.
    """

    optimizer: Any
    reducer: Reducer
    grad_norm_clipping: float | None


class SessionStep:
    """One step of K towers.

    Attributes:
      inputs: the rows that it takes.
      common_loss: what ``build_graph`` made of the whole placeholders.
      losses: [K], what it made of the towers' rows.
      weights: [K] scalars, rows that count; None without pads.
      train_op: changes the variables.
      fetches: [K] dictionaries, what else each tower wants computed.
    """

    def __init__(
        self,
        towers: Sequence[Tower],
        inputs: StepInputs,
        placeholders: Sequence[tf.Tensor],
        build_graph: Callable[..., Any],
        update: Update,
    ) -> None:
        """Builds the losses and the update in the default graph.

        Args:
          towers: K towers.
          inputs: of the step.
          placeholders: one a column, for the common loss.
          build_graph: as users give it.
          update: how to change the variables.

        Raises:
          ValueError, TypeError: towers that do not match, or no loss objects.
        """
        self.inputs, pads = inputs, inputs.has_weights
        whole, build_loss = list(placeholders), build_graph
        if pads:
            build_loss = with_weights(build_graph)
            whole.append(tf.ones(tf.shape(whole[0])[:1]))
        rows, optimizer = inputs.tensors, update.optimizer
        built = build_losses(towers, whole, rows, build_loss, optimizer, caller=_NAME)
        self.common_loss, self.losses = built.common, built.towers
        self.weights = sum_weights(towers, rows) if pads else None
        self.train_op = _apply(built, self.weights, update)
        self.fetches = [fetches_of(loss) for loss in self.losses]

    def run(
        self, calls: SessionCalls, sess: Any, loaded: Loaded, first: int
    ) -> dict[str, Any]:
        """Trains on one minibatch.

        Args:
          calls: keeps the callable.
          sess: session.
          loaded: the current batch.
          first: number of the minibatch's first sequence on each device.

        Returns:
          ``{"train": None}``, the last tower's fetches, and ``"towers"``.
        """
        feeds = {**self.own_feeds(), **self.inputs.feeds(loaded, first)}
        fetches = {**self.fetches[-1], "train": self.train_op, "towers": self.fetches}
        fetched: dict[str, Any] = calls.run(sess, "step", fetches, feeds)
        return fetched

    def own_feeds(self) -> dict[Any, Any]:
        """Returns the losses' own placeholders and their present values."""
        feeds: dict[Any, Any] = {}
        for loss in self.losses:
            feeds.update(feeds_of(loss))
        return feeds


def _apply(
    built: BuiltLosses, weights: Sequence[tf.Tensor] | None, update: Update
) -> tf.Operation:
    check_shared(built.grad_list, caller=_NAME)
    pairs = combine_gradients(
        built.grad_list,
        reducer=update.reducer,
        tower_weights=weights,
        grad_norm_clipping=update.grad_norm_clipping,
        caller=_NAME,
    )
    with tf.control_dependencies(built.updates):
        return update.optimizer.apply_gradients(pairs[0])

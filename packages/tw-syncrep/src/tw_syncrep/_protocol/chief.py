"""What the chief runs over and over: decide, add up, apply, let everyone go on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import apart_from_the_caller, on_device
from tw_syncrep._protocol.decision import Arrivals, decide
from tw_syncrep._protocol.gradient_queue import Lane
from tw_syncrep._protocol.run_table import Board, Field, ring_key
from tw_syncrep._protocol.wake_queues import Waiting

Apply = Callable[[dict[int, Any]], Any]
"""Takes mean gradients by index; returns the op that has applied them."""


@dataclass(frozen=True)
class Meeting:
    """Where the replicas of one optimizer meet.

    Attributes:
      arrivals: where replicas announce themselves; with the gradients of the
        board's server.
      waiting: how replicas are woken.
      lanes: one for each other server that gets gradients.
    """

    arrivals: Arrivals
    waiting: Waiting
    lanes: tuple[Lane, ...]

    @property
    def board(self) -> Board:
        """How the run stands."""
        return self.arrivals.board

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return len(self.arrivals.quota)

    @property
    def aggregate(self) -> int:
        """Gradients that make a round."""
        return self.arrivals.aggregate


def build_round(
    meeting: Meeting, apply: Apply, *, global_step: tf.Variable
) -> tf.Operation:
    """Builds one round of the chief.

    Args:
      meeting: where the gradients are.
      apply: called once, while the graph is built.
      global_step: that it increases.

    Returns:
      The op that waits for a round's gradients, applies their mean and wakes
      the replicas. It runs on the parameter servers alone.
    """
    board = meeting.board
    with apart_from_the_caller(), on_device(board.device):
        dropped_before = board.read([Field.DROPPED])[0]
        decision = decide(meeting.arrivals)
        means = meeting.arrivals.payload.means(decision.sums, decision.count)
        for lane in meeting.lanes:
            means |= lane.collect(decision.tickets)
        # Some optimizers begin without their gradients, as Adam does by decaying
        # the moments of sparse ones; a checkpoint must not catch that.
        with tf.control_dependencies([decision.count]):
            applied = apply(means)
        with tf.control_dependencies([applied]):
            ended = decision.round_number
            rows = [
                (Field.ROUND, ended + 1),
                (Field.STEP, global_step.read_value()),
                (Field.DROPPED, dropped_before + decision.dropped),
                (ring_key(ended), board.now()),
            ]
            written = board.write(rows)
        with tf.control_dependencies([written]):
            return meeting.waiting.end_round()

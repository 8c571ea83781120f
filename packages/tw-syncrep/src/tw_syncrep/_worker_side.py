"""What every replica runs as its training op: push, announce, wait, pull."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._board import Board, ReplicaField, replica_key
from tw_syncrep._chief_side import Meeting
from tw_syncrep._mirrors import Mirror, mirrors_of, refresh
from tw_syncrep._on_device import apart_from_the_caller, on_device
from tw_syncrep._ticket import make_ticket


@dataclass(frozen=True)
class Replica:
    """One replica's part of the graph.

    Attributes:
      index: its number.
      device: of the worker.
      place: local variable, int64 [2]: round and epoch it computes for.
      mirrors: its copies of the parameters that the optimizer changes.
      below: bytes of a parameter that is pulled in a pack with others.
    """

    index: int
    device: str
    place: tf.Variable
    mirrors: tuple[Mirror, ...]
    below: int

    def goes_on_at(self, stand: tf.Tensor) -> tf.Operation:
        """Returns the op that notes round and epoch and renews the parameters.

        Args:
          stand: int64 [2 or 3], on the board's server.
        """
        renewed = refresh(self.mirrors, after=stand, below=self.below)
        with on_device(self.device):
            place = tf.identity(stand)[:2]
            # Last: what is noted tells the guard that nothing is on its way.
            with tf.control_dependencies([renewed]):
                noted: tf.Operation = self.place.assign(place, read_value=False)
        return noted


def make_replica(
    index: int, variables: Sequence[tf.Variable], *, name: str, below: int
) -> Replica:
    """Makes the local state of a replica on the device that the caller is on."""
    device = tf.no_op(name="worker").device
    with apart_from_the_caller(), tf.device(device):
        place = tf.compat.v1.Variable(
            tf.zeros([2], tf.int64),
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            name=f"{name}/replica_{index}/sync_rep_local_step",
            use_resource=True,
        )
    return Replica(index, device, place, mirrors_of(variables), below)


def build_step(
    meeting: Meeting, replica: Replica, grads: Mapping[int, Any]
) -> tuple[tf.Operation, tf.Tensor]:
    """Builds a replica's training step, after its gradients.

    Args:
      meeting: where to send them.
      replica: who sends.
      grads: by index.

    Returns:
      The training op, and what it returns with: int64 [3] round, epoch and
      token, on the worker.
    """
    ticket = make_ticket(replica.index, replica.place.read_value())
    pushed = [lane.push(ticket, grads) for lane in meeting.lanes]
    sent = meeting.arrivals.payload.of(grads)
    with on_device(meeting.board.device):
        ticket = tf.identity(ticket)
        with tf.control_dependencies(pushed):
            announced = _announce(meeting, replica.index, ticket, sent)
        # A loop with one input from elsewhere becomes a loop over the network.
        with tf.control_dependencies([announced]):
            stand = meeting.waiting.wait(replica.index, ticket[1:3])
    on_the_way = replica.goes_on_at(stand)
    with on_device(replica.device), tf.control_dependencies([on_the_way]):
        reply = tf.identity(stand, name="reply")
    return reply.op, reply


def _announce(
    meeting: Meeting, replica: int, ticket: tf.Tensor, sent: Sequence[tf.Tensor]
) -> tf.Operation:
    # The ticket first: who is killed in between has arrived, and is only called
    # missing; the other way round, the chief would be blamed.
    board: Board = meeting.board
    with on_device(board.device):
        arrived = meeting.arrivals.queue.enqueue([ticket, *sent])
        with tf.control_dependencies([arrived]):
            now = board.now()
            count = _count(board, replica, ticket, meeting.arrivals.quota[replica])
        rows = {
            ReplicaField.HEARD: now,
            ReplicaField.ARRIVED_ROUND: ticket[1],
            ReplicaField.ARRIVED_EPOCH: ticket[2],
            ReplicaField.ARRIVED_AT: now,
            ReplicaField.ARRIVALS: count,
        }
        return board.write({replica_key(replica, f): row for f, row in rows.items()})


def _count(board: Board, replica: int, ticket: tf.Tensor, quota: int) -> Any:
    """Counts a replica's gradients of a round, this one included."""
    if quota == 1:
        return 1
    fields = (ReplicaField.ARRIVED_ROUND, ReplicaField.ARRIVED_EPOCH)
    before = board.read(
        [replica_key(replica, field) for field in (*fields, ReplicaField.ARRIVALS)]
    )
    is_same = tf.reduce_all(tf.equal(before[:2], ticket[1:3]))
    return tf.where(is_same, before[2], tf.zeros_like(before[2])) + 1

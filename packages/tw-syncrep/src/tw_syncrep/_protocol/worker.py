"""What every replica runs as its training op: push, announce, wait, pull."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import apart_from_the_caller, on_device
from tw_syncrep._protocol.chief import Meeting
from tw_syncrep._protocol.run_table import Board, ReplicaField, replica_key
from tw_syncrep._protocol.ticket import make_ticket
from tw_syncrep._transfer.parameter_cache import Mirror, mirrors_of, refresh


@dataclass(frozen=True)
class Replica:
    """One replica's part of the graph.

    Attributes:
      index: its number.
      device: of the worker.
      place: local variable, int64 [2]: round and epoch it computes for.
      local_step: local variable, []: the global step that it computes for, under
        TensorFlow's name and dtype, for those who look there.
      mirrors: its copies of the parameters that the optimizer changes.
      below: bytes of a parameter that is pulled in a pack with others.
    """

    index: int
    device: str
    place: tf.Variable
    local_step: tf.Variable
    mirrors: tuple[Mirror, ...]
    below: int

    def goes_on_at(self, stand: tf.Tensor) -> tf.Operation:
        """Returns the op that notes where it is and renews the parameters.

        Args:
          stand: int64 [3 or more]: round, epoch, global step; on the board's server.
        """
        renewed = refresh(self.mirrors, after=stand, below=self.below)
        with on_device(self.device):
            stand = tf.identity(stand)
            step = tf.cast(stand[2], self.local_step.dtype)
            # Last: what is noted tells the guard that nothing is on its way.
            with tf.control_dependencies([renewed]):
                return tf.group(
                    self.place.assign(stand[:2], read_value=False),
                    self.local_step.assign(step, read_value=False),
                )


def make_replica(
    index: int,
    variables: Sequence[tf.Variable],
    *,
    step_dtype: tf.DType,
    name: str,
    below: int,
) -> Replica:
    """Makes the local state of a replica on the device that the caller is on."""
    device = tf.no_op(name="worker").device
    with apart_from_the_caller(), tf.device(device):
        place = _local(tf.zeros([2], tf.int64), f"{name}/replica_{index}/place")
        local_step = _local(tf.zeros([], step_dtype), "sync_rep_local_step")
    return Replica(index, device, place, local_step, mirrors_of(variables), below)


def _local(start: tf.Tensor, name: str) -> tf.Variable:
    return tf.compat.v1.Variable(
        start,
        trainable=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        name=name,
        use_resource=True,
    )


def build_step(
    meeting: Meeting, replica: Replica, grads: Mapping[int, Any]
) -> tuple[tf.Operation, tf.Tensor]:
    """Builds a replica's training step, after its gradients.

    Args:
      meeting: where to send them.
      replica: who sends.
      grads: by index.

    Returns:
      The training op, and what it returns with: int64 [4] round, epoch, global
      step and token, on the worker.
    """
    ticket = make_ticket(replica.index, replica.place.read_value())
    pushed = [lane.push(ticket, grads) for lane in meeting.lanes]
    sent = meeting.arrivals.payload.of(grads)
    with on_device(meeting.board.device):
        ticket = tf.identity(ticket)
        with tf.control_dependencies(pushed):
            announced, count = _announce(meeting, replica.index, ticket, sent)
        # A loop with one input from elsewhere becomes a loop over the network.
        with tf.control_dependencies([announced]):
            stand = meeting.waiting.wait(
                replica.index,
                ticket[1:3],
                count,
                quota=meeting.arrivals.quota[replica.index],
            )
    on_the_way = replica.goes_on_at(stand)
    with on_device(replica.device), tf.control_dependencies([on_the_way]):
        reply = tf.identity(stand, name="reply")
    return reply.op, reply


def _announce(
    meeting: Meeting, replica: int, ticket: tf.Tensor, sent: Sequence[tf.Tensor]
) -> tuple[tf.Operation, tf.Tensor]:
    """Returns the op that tells the board, and which gradient of its place it is."""
    # The ticket first: who is killed in between has arrived, and is only called
    # missing; the other way round, the chief would be blamed.
    board: Board = meeting.board
    with on_device(board.device):
        arrived = meeting.arrivals.queue.enqueue([ticket, *sent])
        with tf.control_dependencies([arrived]):
            now = board.now()
            count = _count(board, replica, ticket)
        rows = {
            ReplicaField.HEARD: now,
            ReplicaField.ARRIVED_ROUND: ticket[1],
            ReplicaField.ARRIVED_EPOCH: ticket[2],
            ReplicaField.ARRIVED_AT: now,
            ReplicaField.ARRIVALS: count,
        }
        keyed = {replica_key(replica, field): row for field, row in rows.items()}
        return board.write(keyed), count


def _count(board: Board, replica: int, ticket: tf.Tensor) -> tf.Tensor:
    """Counts a replica's gradients of a round and epoch, this one included."""
    fields = (ReplicaField.ARRIVED_ROUND, ReplicaField.ARRIVED_EPOCH)
    before = board.read(
        [replica_key(replica, field) for field in (*fields, ReplicaField.ARRIVALS)]
    )
    is_same = tf.reduce_all(tf.equal(before[:2], ticket[1:3]))
    return tf.where(is_same, before[2], tf.zeros_like(before[2])) + 1

"""What every replica runs as its training op: push, announce, wait, pull."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import exact_device_scope
from tw_syncrep._protocol.replica import Replica
from tw_syncrep._protocol.run_table import (
    ReplicaField,
    RunTable,
    make_ticket,
    replica_key,
)
from tw_syncrep._protocol.state import SyncState


def build_step(
    state: SyncState, replica: Replica, grads: Mapping[int, Any]
) -> tuple[tf.Operation, tf.Tensor]:
    """Builds a replica's training step, after its gradients.

    Args:
      state: where to send them.
      replica: who sends.
      grads: by index.

    Returns:
      The training op, and what it returns: int64 [4] round, incarnation, global step
      and ``WakeReason``, on the worker.
    """
    ticket = make_ticket(replica.index, replica.position.read_value())
    pushed = [
        queue.enqueue(ticket, queue.payload.encode(grads))
        for queue in state.gradient_queues
    ]
    sent = state.arrivals.payload.encode(grads)
    with exact_device_scope(state.table.device):
        ticket = tf.identity(ticket)
        with tf.control_dependencies(pushed):
            announced, count = _announce(state, replica.index, ticket, sent)
        # A loop with one input from elsewhere becomes a loop over the network.
        with tf.control_dependencies([announced]):
            progress = state.wake_queues.wait(
                replica.index, ticket[1:3], count, quota=state.quota[replica.index]
            )
    continued = replica.continue_at(progress)
    with exact_device_scope(replica.device), tf.control_dependencies([continued]):
        reply = tf.identity(progress, name="reply")
    return reply.op, reply


def _announce(
    state: SyncState, replica: int, ticket: tf.Tensor, sent: Sequence[tf.Tensor]
) -> tuple[tf.Operation, tf.Tensor]:
    """Returns the op that records an arrival, and which of its position's it is."""
    # The ticket first: a replica killed in between has arrived, and is only called
    # missing; the other way round, the chief would be blamed.
    table = state.table
    with tf.control_dependencies([state.arrivals.enqueue(ticket, sent)]):
        now = table.now()
        count = _count_arrivals(table, replica, ticket)
    rows = {
        ReplicaField.HEARD: now,
        ReplicaField.ARRIVED_ROUND: ticket[1],
        ReplicaField.ARRIVED_INCARNATION: ticket[2],
        ReplicaField.ARRIVED_AT: now,
        ReplicaField.ARRIVALS: count,
    }
    keyed = {replica_key(replica, field): row for field, row in rows.items()}
    return table.write(keyed), count


def _count_arrivals(table: RunTable, replica: int, ticket: tf.Tensor) -> tf.Tensor:
    """Counts a replica's gradients of a round and incarnation, this one included."""
    fields = (
        ReplicaField.ARRIVED_ROUND,
        ReplicaField.ARRIVED_INCARNATION,
        ReplicaField.ARRIVALS,
    )
    before = table.read([replica_key(replica, field) for field in fields])
    is_same = tf.reduce_all(tf.equal(before[:2], ticket[1:3]))
    return tf.where(is_same, before[2], tf.zeros_like(before[2])) + 1

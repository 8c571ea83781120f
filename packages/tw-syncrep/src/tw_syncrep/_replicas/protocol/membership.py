"""How replicas leave a run, are evicted from it, end it, and show that they are alive.

The table records the replicas of a run: a round waits for those that have not left.
"""

import tensorflow as tf

from tw_syncrep._replicas.protocol.graph import SyncState
from tw_syncrep._replicas.protocol.run_table import (
    ReplicaField,
    RunField,
    mark_evicted,
    replica_key,
    run_mark,
)


def build_leave(state: SyncState, replica: int) -> tf.Operation:
    """Returns the op with which a replica leaves the run it joined, ended or not."""
    table = state.table
    joined = table.read_of(replica, ReplicaField.JOINED)[0]
    rows = {ReplicaField.HEARD: table.now(), ReplicaField.LEFT: joined}
    left = table.write_of(replica, rows)
    with tf.control_dependencies([left]):
        return state.notify_chief(replica)


def build_evict(
    state: SyncState, replica: int, *, position: tf.Tensor, whom: tf.Tensor
) -> tf.Operation:
    """Returns the op after which the round at ``position`` stops waiting for ``whom``.

    Nothing happens if the round is over, or to replicas that have arrived since.
    """
    table = state.table
    baton = table.take_baton()  # If several evict at once, one counts.
    with tf.control_dependencies([baton]):
        now = table.read([RunField.ROUND, RunField.INCARNATION, RunField.RUN])
        is_due = tf.reduce_all(tf.equal(now[:2], position))
        missing = tf.logical_not(_have_arrived(state, position))
        out = tf.logical_and(tf.logical_and(is_due, whom > 0), missing)
        written = mark_evicted(table, out, run=now[2])
    with tf.control_dependencies([written]):
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back]):
        return state.notify_chief(replica)


def build_close(state: SyncState, replica: int) -> tf.Operation:
    """Returns the op with which a replica ends the run it joined, but no later one."""
    table = state.table
    joined = replica_key(replica, ReplicaField.JOINED)
    baton = table.take_baton()  # No other run begins in between.
    with tf.control_dependencies([baton]):
        rows = table.read([joined, RunField.RUN, RunField.CLOSED])
    is_own = tf.cast(tf.equal(rows[0], run_mark(rows[1])), tf.int64)
    closed = table.write({RunField.CLOSED: tf.maximum(is_own, rows[2])})
    with tf.control_dependencies([closed]):
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back]):
        return state.wake_queues.wake_all()


def build_heartbeat(state: SyncState, replica: int) -> tf.Operation:
    """Returns the op that records that the replica is alive."""
    now = state.table.now()
    return state.table.write_of(replica, {ReplicaField.HEARD: now})


def _have_arrived(state: SyncState, position: tf.Tensor) -> tf.Tensor:
    """Returns which replicas have sent all their gradients of a round, bool [R]."""
    arrived_round, incarnation, arrivals = state.table.read_fields(
        state.replicas,
        ReplicaField.ARRIVED_ROUND,
        ReplicaField.ARRIVED_INCARNATION,
        ReplicaField.ARRIVALS,
    )
    in_round = tf.equal(arrived_round, position[0])
    in_incarnation = tf.equal(incarnation, position[1])
    have_all = arrivals >= tf.constant(state.quota, tf.int64)
    return in_round & in_incarnation & have_all

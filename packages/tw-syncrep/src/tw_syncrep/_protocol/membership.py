"""How a replica joins and leaves a run, is evicted from it, and shows that it lives.

Who is in a run is what the table's rows say: a round waits for those who have not left.
"""

import tensorflow as tf

from tw_syncrep._exact_device_scope import exact_device_scope
from tw_syncrep._protocol.graph import SyncState
from tw_syncrep._protocol.replica import Replica
from tw_syncrep._protocol.run_table import (
    ReplicaField,
    RunField,
    make_notice,
    replica_key,
    replica_keys,
    run_mark,
)

REFUSED = -1
"""Number of the session of a process whose replica's number a later one has taken."""


def draw_life(state: SyncState, replica: int) -> tf.Tensor:
    """Returns a number for a process that is to join, later than any before, int64 [].

    It is drawn by itself, before the first join: a join that was left behind by a
    process that is gone would otherwise count as the latest of all.
    """
    fields = [ReplicaField.LIFE, ReplicaField.COUNTED]
    latest = state.table.read([replica_key(replica, field) for field in fields])
    return state.table.now(above=tf.unstack(latest))


def has_number(state: SyncState, replica: int, life: tf.Tensor) -> tf.Tensor:
    """Returns whether a replica's number is still a process's own, bool [].

    Args:
      state: of the optimizer.
      replica: its number.
      life: int64 [], of the process; 0 where it has drawn none.
    """
    latest = state.table.read([replica_key(replica, ReplicaField.LIFE)])[0]
    return tf.logical_or(tf.equal(life, 0), life >= latest)


def build_join(
    state: SyncState, replica: Replica, *, global_step: tf.Variable, life: tf.Tensor
) -> tf.Operation:
    """Returns the op with which a replica continues where the run stands.

    Its local variable for the session gets the number of the new one, or REFUSED.

    Args:
      state: of the optimizer.
      replica: who joins.
      global_step: what the run stands at.
      life: int64 [], of the process; 0 where it has drawn none.
    """
    table, own = state.table, replica.index
    fields = [ReplicaField.SESSION, ReplicaField.COUNTED]
    latest = table.read([replica_key(own, field) for field in fields])
    now = table.now()
    number = table.now(above=tf.unstack(latest))
    is_own = has_number(state, own, life)
    # After a run closes, joiners belong to the next run.
    run = tf.reduce_sum(table.read([RunField.RUN, RunField.CLOSED]))
    rows = {
        ReplicaField.HEARD: now,
        ReplicaField.LEFT: 0,
        ReplicaField.JOINED: run_mark(run),
        ReplicaField.SESSION: number,
    }
    keyed = {replica_key(own, field): row for field, row in rows.items()}
    written = [table.write(keyed, where=is_own), take_number(state, own, life)]
    with tf.control_dependencies(written):
        notified = notify_chief(state, own)
        position = table.read([RunField.ROUND, RunField.INCARNATION])
        # The chief may not have written the table's own yet.
        step = tf.cast(global_step.read_value(), tf.int64)
        given = tf.where(is_own, number, REFUSED)
        progress = tf.concat([position, tf.stack([step, given])], axis=0)
    progress, continued = replica.continue_at(progress, is_published=False)
    with exact_device_scope(replica.device):
        session = replica.session.assign(progress[3], read_value=False)
    return tf.group(notified, session, continued)


def take_number(state: SyncState, replica: int, life: tf.Tensor) -> tf.Operation:
    """Returns the op by which a process has a replica's number, if it is the latest."""
    key = replica_key(replica, ReplicaField.LIFE)
    latest = state.table.read([key])[0]
    return state.table.write({key: life}, where=life > latest)


def build_leave(state: SyncState, replica: Replica) -> tf.Operation:
    """Returns the op that leaves the run that it joined, which may have ended."""
    table = state.table
    joined = table.read([replica_key(replica.index, ReplicaField.JOINED)])[0]
    left = table.write(
        {
            replica_key(replica.index, ReplicaField.HEARD): table.now(),
            replica_key(replica.index, ReplicaField.LEFT): joined,
        }
    )
    with tf.control_dependencies([left]):
        return notify_chief(state, replica.index)


def build_evict(
    state: SyncState, replica: int, *, position: tf.Tensor, whom: tf.Tensor
) -> tf.Operation:
    """Returns the op that has a round no longer wait for some replicas.

    Nothing happens where the round is over, or to those who have arrived since.

    Args:
      state: of the optimizer.
      replica: who evicts.
      position: int64 [2], the round and incarnation that it waits in.
      whom: int64 [R], 1 for each replica to be evicted.
    """
    table = state.table
    baton = table.take_baton()  # Of several that evict at a time, one counts.
    with tf.control_dependencies([baton]):
        now = table.read([RunField.ROUND, RunField.INCARNATION, RunField.RUN])
        is_due = tf.reduce_all(tf.equal(now[:2], position))
        missing = tf.logical_not(_have_arrived(state, position))
        out = tf.logical_and(tf.logical_and(is_due, whom > 0), missing)
        written = mark_evicted(state, out, run=now[2])
    with tf.control_dependencies([written]):
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back]):
        return notify_chief(state, replica)


def mark_evicted(state: SyncState, out: tf.Tensor, *, run: tf.Tensor) -> tf.Operation:
    """Returns the op that marks and counts replicas as evicted, under the baton.

    Args:
      state: of the optimizer.
      out: bool [R]; who has left already is not marked again.
      run: int64 [], the run's number.
    """
    table = state.table
    keys = replica_keys(state.replicas, ReplicaField.LEFT)
    mark = run_mark(run)
    out = tf.logical_and(out, tf.not_equal(tf.abs(table.read(keys)), mark))
    count = table.read([RunField.EVICTED])[0]
    more = tf.reduce_sum(tf.cast(out, tf.int64))
    counted = table.write({RunField.EVICTED: count + more})
    marks = tf.fill([state.replicas], -mark)
    return tf.group(counted, table.write([(keys, marks)], where=out))


def build_close(state: SyncState, replica: Replica) -> tf.Operation:
    """Returns the op that ends the run that it joined, and no later one."""
    table = state.table
    joined = replica_key(replica.index, ReplicaField.JOINED)
    baton = table.take_baton()  # No other run begins in between.
    with tf.control_dependencies([baton]):
        rows = table.read([joined, RunField.RUN, RunField.CLOSED])
    is_own = tf.cast(tf.equal(rows[0], run_mark(rows[1])), tf.int64)
    closed = table.write({RunField.CLOSED: tf.maximum(is_own, rows[2])})
    with tf.control_dependencies([closed]):
        given_back = table.give_back(baton)
    with tf.control_dependencies([given_back]):
        return state.wake_queues.wake_all()


def build_heartbeat(state: SyncState, replica: Replica) -> tf.Operation:
    """Returns the op that records that the replica lives."""
    heard = replica_key(replica.index, ReplicaField.HEARD)
    return state.table.write({heard: state.table.now()})


def notify_chief(state: SyncState, replica: int) -> tf.Operation:
    """Returns the op that has the chief read the table again."""
    incarnation = state.table.read([RunField.INCARNATION])[0]
    ticket = make_notice(replica, incarnation)
    return state.arrivals.enqueue(ticket, state.arrivals.payload.encode_nothing())


def _have_arrived(state: SyncState, position: tf.Tensor) -> tf.Tensor:
    """Returns which replicas have brought all their gradients of a round, bool [R]."""
    rows = {
        field: state.table.read(replica_keys(state.replicas, field))
        for field in (
            ReplicaField.ARRIVED_ROUND,
            ReplicaField.ARRIVED_INCARNATION,
            ReplicaField.ARRIVALS,
        )
    }
    in_round = tf.equal(rows[ReplicaField.ARRIVED_ROUND], position[0])
    in_incarnation = tf.equal(rows[ReplicaField.ARRIVED_INCARNATION], position[1])
    have_all = rows[ReplicaField.ARRIVALS] >= tf.constant(state.quota, tf.int64)
    return in_round & in_incarnation & have_all

"""What runs around the steps: joining, leaving, closing, heartbeats and wake-ups."""

from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import detached_scope, exact_device_scope
from tw_syncrep._protocol.graph import LifecycleOps
from tw_syncrep._protocol.replica import Replica
from tw_syncrep._protocol.run_table import (
    ReplicaField,
    RunField,
    make_notice,
    replica_key,
    replica_keys,
    ring_keys,
    run_mark,
)
from tw_syncrep._protocol.state import SyncState, share_initial_tokens


def build_lifecycle_ops(
    state: SyncState, replica: Replica, *, global_step: tf.Variable
) -> LifecycleOps:
    """Builds the ops, detached from the caller's devices and control inputs."""
    with detached_scope(), exact_device_scope(state.table.device):
        with exact_device_scope(replica.device):
            own = replica.position.read_value()
        position = tf.compat.v1.placeholder_with_default(own, [2], name="place")
        none = tf.zeros([state.replicas], tf.int64)
        initial = tf.compat.v1.placeholder_with_default(
            none, [state.replicas], name="initial"
        )
        return LifecycleOps(
            join=_join(state, replica, global_step),
            open=_open(state, replica, initial, global_step),
            initial=initial,
            leave=_leave(state, replica),
            close=_close(state, replica),
            heartbeat=_heartbeat(state, replica),
            wake=state.wake_queues.wake(replica.index, position),
            position=position,
            status=_status(state, global_step),
        )


def build_initial_tokens_op(state: SyncState, num_tokens: int) -> tf.Operation:
    """Returns the op that gives out initial tokens; see ``share_initial_tokens``."""
    counts = share_initial_tokens(
        num_tokens, aggregate=state.aggregate, replicas=state.replicas
    )
    with detached_scope():
        rows = _initial_rows(tf.constant(counts, tf.int64), state.replicas)
        with exact_device_scope(state.table.device):
            given = state.table.write(rows)
            with tf.control_dependencies([given]):
                # Replicas that already wait must read the table again.
                woken = state.wake_queues.wake_all()
        with tf.control_dependencies([given]):
            return tf.group(woken, name="init_tokens")


def make_queue_runner(state: SyncState, round_op: tf.Operation) -> Any:
    """Makes a ``QueueRunner`` of the chief's rounds; at its end it closes the queues.

    Args:
      state: of the optimizer.
      round_op: one round of the chief.
    """
    queue = state.arrivals.queue
    with detached_scope(), exact_device_scope(state.table.device):
        close = tf.group(queue.close(), state.wake_queues.close())
    return tf.compat.v1.train.QueueRunner(
        queue, [round_op], close_op=close, cancel_op=close
    )


def _join(state: SyncState, replica: Replica, global_step: tf.Variable) -> tf.Operation:
    table = state.table
    # After a run closes, joiners belong to the next run.
    run = tf.reduce_sum(table.read([RunField.RUN, RunField.CLOSED]))
    joined = table.write(
        {
            replica_key(replica.index, ReplicaField.HEARD): table.now(),
            replica_key(replica.index, ReplicaField.LEFT): 0,
            replica_key(replica.index, ReplicaField.JOINED): run_mark(run),
        }
    )
    with tf.control_dependencies([joined]):
        notified = _notify_chief(state, replica)
        position = table.read([RunField.ROUND, RunField.INCARNATION])
        # The chief may not have written the table's own yet.
        step = tf.cast(global_step.read_value(), tf.int64)
        progress = tf.concat([position, step[tf.newaxis]], axis=0)
    return tf.group(notified, replica.continue_at(progress))


def _notify_chief(state: SyncState, replica: Replica) -> tf.Operation:
    """Has the chief read the table again."""
    ticket = make_notice(replica.index)
    return state.arrivals.enqueue(ticket, state.arrivals.payload.encode_nothing())


def _open(
    state: SyncState, replica: Replica, initial: tf.Tensor, global_step: tf.Variable
) -> tf.Operation:
    """Begins an incarnation, and another run where the last has ended.

    Nothing that was interrupted before reaches into the incarnation. Initial tokens
    are written with it, as replicas begin their steps when they see it.
    """
    table = state.table
    cleared = [op for payload in state.payloads for op in payload.clear()]
    with tf.control_dependencies(cleared):
        before = table.read([RunField.ROUND, RunField.RUN, RunField.CLOSED])
        step = global_step.read_value()
        opened = table.write(
            {
                RunField.INCARNATION: table.now(),
                RunField.CLOSED: 0,
                RunField.CHIEF: replica.index,
                RunField.FIRST_ROUND: before[0],
                RunField.RUN: before[1] + before[2],
                RunField.STEP: step,
                RunField.FIRST_STEP: step,
                **_initial_rows(initial, state.replicas),
            }
        )
    with tf.control_dependencies([opened]):
        return tf.group(
            state.wake_queues.wake_all(), _join(state, replica, global_step)
        )


def _initial_rows(initial: tf.Tensor, replicas: int) -> dict[Any, Any]:
    """Returns the table's rows for each replica's initial tokens, int64 [R]."""
    keys = replica_keys(replicas, ReplicaField.INITIAL)
    return dict(zip(keys, tf.unstack(initial, replicas), strict=True))


def _leave(state: SyncState, replica: Replica) -> tf.Operation:
    """Leaves the run that it joined, which may have ended long ago."""
    table = state.table
    joined = table.read([replica_key(replica.index, ReplicaField.JOINED)])[0]
    left = table.write(
        {
            replica_key(replica.index, ReplicaField.HEARD): table.now(),
            replica_key(replica.index, ReplicaField.LEFT): joined,
        }
    )
    with tf.control_dependencies([left]):
        return _notify_chief(state, replica)


def _close(state: SyncState, replica: Replica) -> tf.Operation:
    """Ends the run that it joined, and no later one."""
    joined = replica_key(replica.index, ReplicaField.JOINED)
    rows = state.table.read([joined, RunField.RUN, RunField.CLOSED])
    is_own = tf.cast(tf.equal(rows[0], run_mark(rows[1])), tf.int64)
    closed = state.table.write({RunField.CLOSED: tf.maximum(is_own, rows[2])})
    with tf.control_dependencies([closed]):
        return state.wake_queues.wake_all()


def _heartbeat(state: SyncState, replica: Replica) -> tf.Operation:
    heard = replica_key(replica.index, ReplicaField.HEARD)
    return state.table.write({heard: state.table.now()})


def _status(state: SyncState, global_step: tf.Variable) -> list[tf.Tensor]:
    table, replicas = state.table, state.replicas
    step = tf.reshape(tf.cast(global_step.read_value(), tf.int64), [1])
    about_run = tf.concat(
        [table.read(list(RunField)), tf.reshape(table.now(), [1]), step], axis=0
    )
    about_replicas = [table.read(replica_keys(replicas, f)) for f in ReplicaField]
    about_replicas.append(tf.constant(state.quota, tf.int64))
    return [about_run, tf.stack(about_replicas), table.read(ring_keys())]

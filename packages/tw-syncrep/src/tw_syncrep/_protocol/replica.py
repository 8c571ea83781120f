"""What a replica does: its step, and how it joins and leaves a run.

A step pushes the gradients, announces them, waits for the end of the round and pulls
parameters. What a replica keeps is where it is and, on the worker, its copies of the
parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import detached_scope, exact_device_scope
from tw_syncrep._protocol.graph import SyncState
from tw_syncrep._protocol.run_table import (
    ReplicaField,
    RunField,
    RunTable,
    make_notice,
    make_ticket,
    replica_key,
    run_mark,
)
from tw_syncrep.cluster._parameter_cache import (
    CachedParameter,
    cached_parameters,
    refresh,
)


@dataclass(frozen=True)
class Replica:
    """One replica's part of the graph.

    Attributes:
      index: its number.
      device: of the worker.
      position: local variable, int64 [2]: round and incarnation it computes for.
      local_step: local variable, []: the global step that it computes for, under
        TensorFlow's name and dtype, for those who look there.
      cached: its copies of the parameters that the optimizer changes.
      below_bytes: a smaller parameter is pulled in a pack with others.
    """

    index: int
    device: str
    position: tf.Variable
    local_step: tf.Variable
    cached: tuple[CachedParameter, ...]
    below_bytes: int

    def continue_at(self, progress: tf.Tensor) -> tf.Operation:
        """Returns the op that records where the replica is and pulls parameters.

        Args:
          progress: int64 [3 or more]: round, incarnation, global step; on the run
            table's server.
        """
        pulled = refresh(self.cached, after=progress, below_bytes=self.below_bytes)
        with exact_device_scope(self.device):
            progress = tf.identity(progress)
            step = tf.cast(progress[2], self.local_step.dtype)
            # Last: the watchdog takes the position for a sign that all has arrived.
            with tf.control_dependencies([pulled]):
                return tf.group(
                    self.position.assign(progress[:2], read_value=False),
                    self.local_step.assign(step, read_value=False),
                )


def make_replica(
    index: int,
    variables: Sequence[tf.Variable],
    *,
    step_dtype: tf.DType,
    name: str,
    below_bytes: int,
) -> Replica:
    """Makes the local state of a replica on the current device."""
    device = tf.no_op(name="worker").device
    with detached_scope(), tf.device(device):
        start = tf.zeros([2], tf.int64)
        position = _local_variable(start, f"{name}/replica_{index}/place")
        local_step = _local_variable(tf.zeros([], step_dtype), "sync_rep_local_step")
    names = {variable.name for variable in variables}
    cached = [found for found in cached_parameters() if found.master.name in names]
    return Replica(index, device, position, local_step, tuple(cached), below_bytes)


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


def build_join(
    state: SyncState, replica: Replica, *, global_step: tf.Variable
) -> tf.Operation:
    """Returns the op with which a replica continues where the run stands."""
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
        return _notify_chief(state, replica)


def build_close(state: SyncState, replica: Replica) -> tf.Operation:
    """Returns the op that ends the run that it joined, and no later one."""
    joined = replica_key(replica.index, ReplicaField.JOINED)
    rows = state.table.read([joined, RunField.RUN, RunField.CLOSED])
    is_own = tf.cast(tf.equal(rows[0], run_mark(rows[1])), tf.int64)
    closed = state.table.write({RunField.CLOSED: tf.maximum(is_own, rows[2])})
    with tf.control_dependencies([closed]):
        return state.wake_queues.wake_all()


def build_heartbeat(state: SyncState, replica: Replica) -> tf.Operation:
    """Returns the op that records that the replica lives."""
    heard = replica_key(replica.index, ReplicaField.HEARD)
    return state.table.write({heard: state.table.now()})


def _notify_chief(state: SyncState, replica: Replica) -> tf.Operation:
    """Has the chief read the table again."""
    ticket = make_notice(replica.index)
    return state.arrivals.enqueue(ticket, state.arrivals.payload.encode_nothing())


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


def _local_variable(start: tf.Tensor, name: str) -> tf.Variable:
    return tf.compat.v1.Variable(
        start,
        trainable=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        name=name,
        use_resource=True,
    )

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
      session: local variable, int64 []: in which it has joined; 0 before.
      stamp: int64 [], feeds a step with its batch's number, larger than those before;
        by default one that never counts as seen.
      local_step: local variable, []: the global step that it computes for, under
        TensorFlow's name and dtype, for those who look there.
      cached: its copies of the parameters that the optimizer changes.
      below_bytes: a smaller parameter is pulled in a pack with others.
    """

    index: int
    device: str
    position: tf.Variable
    session: tf.Variable
    stamp: tf.Tensor
    local_step: tf.Variable
    cached: tuple[CachedParameter, ...]
    below_bytes: int

    def continue_at(self, progress: tf.Tensor) -> tuple[tf.Tensor, tf.Operation]:
        """Records where the replica is, and pulls parameters.

        Args:
          progress: int64 [4]: round, incarnation, global step, and another number; on
            the run table's server.

        Returns:
          The same on the worker, and the op that has done both.
        """
        progress, pulled = refresh(
            self.cached, progress, device=self.device, below_bytes=self.below_bytes
        )
        with exact_device_scope(self.device):
            step = tf.cast(progress[2], self.local_step.dtype)
            # Last: the watchdog takes the position for a sign that all has arrived.
            with tf.control_dependencies([pulled]):
                return progress, tf.group(
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
        session = _local_variable(start[0], f"{name}/replica_{index}/session")
        unstamped = -tf.cast(tf.timestamp() * 1e6, tf.int64)
        stamp = tf.compat.v1.placeholder_with_default(unstamped, [], name="stamp")
        local_step = _local_variable(tf.zeros([], step_dtype), "sync_rep_local_step")
    names = {variable.name for variable in variables}
    cached = [found for found in cached_parameters() if found.master.name in names]
    return Replica(
        *(index, device, position, session, stamp),
        *(local_step, tuple(cached), below_bytes),
    )


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
    ticket = make_ticket(
        replica.index,
        replica.position.read_value(),
        session=replica.session.read_value(),
        stamp=replica.stamp,
    )
    pushed = [
        queue.enqueue(*queue.receive(ticket, grads)) for queue in state.gradient_queues
    ]
    # A loop with one input from elsewhere becomes a loop over the network: from here
    # on, the ticket is the one that the server has received.
    ticket, sent = state.arrivals.receive(ticket, grads)
    with exact_device_scope(state.table.device):
        with tf.control_dependencies(pushed):
            announced, count = _announce(state, replica.index, ticket, sent)
        with tf.control_dependencies([announced]):
            progress = state.wake_queues.wait(
                replica.index, ticket, count, quota=state.quota[replica.index]
            )
    reply, continued = replica.continue_at(progress)
    with exact_device_scope(replica.device), tf.control_dependencies([continued]):
        reply = tf.identity(reply, name="reply")
    return reply.op, reply


def build_join(
    state: SyncState, replica: Replica, *, global_step: tf.Variable
) -> tf.Operation:
    """Returns the op with which a replica continues where the run stands."""
    table = state.table
    now = table.now()
    # After a run closes, joiners belong to the next run.
    run = tf.reduce_sum(table.read([RunField.RUN, RunField.CLOSED]))
    joined = table.write(
        {
            replica_key(replica.index, ReplicaField.HEARD): now,
            replica_key(replica.index, ReplicaField.LEFT): 0,
            replica_key(replica.index, ReplicaField.JOINED): run_mark(run),
            replica_key(replica.index, ReplicaField.SESSION): now,
        }
    )
    with tf.control_dependencies([joined]):
        notified = _notify_chief(state, replica)
        position = table.read([RunField.ROUND, RunField.INCARNATION])
        # The chief may not have written the table's own yet.
        step = tf.cast(global_step.read_value(), tf.int64)
        progress = tf.concat([position, tf.stack([step, now])], axis=0)
    progress, continued = replica.continue_at(progress)
    with exact_device_scope(replica.device):
        session = replica.session.assign(progress[3], read_value=False)
    return tf.group(notified, session, continued)


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


def _notify_chief(state: SyncState, replica: Replica) -> tf.Operation:
    """Has the chief read the table again."""
    incarnation = state.table.read([RunField.INCARNATION])[0]
    ticket = make_notice(replica.index, incarnation)
    return state.arrivals.enqueue(ticket, state.arrivals.payload.encode_nothing())


def _announce(
    state: SyncState, replica: int, ticket: tf.Tensor, sent: Sequence[tf.Tensor]
) -> tuple[tf.Operation, tf.Tensor]:
    """Returns the op that records an arrival, and which of its position's it is.

    A batch that has been accepted, in a session that was lost, does not arrive again:
    its replica waits for the end of that round, where it is still in progress.
    """
    table = state.table
    before = _ArrivalRows(table.read([replica_key(replica, f) for f in _ARRIVAL]))
    counted = before.counts(ticket)
    sent_as = tf.where(counted, make_notice(replica, ticket[2]), ticket)
    # The ticket first: a replica killed in between has arrived, and is only called
    # missing; the other way round, the chief would be blamed.
    with tf.control_dependencies([state.arrivals.enqueue(sent_as, sent)]):
        now = table.now()
    arrived_round = tf.where(counted, before.counted_round, ticket[1])
    count = before.count_of(ticket)
    rows = {
        ReplicaField.HEARD: now,
        ReplicaField.ARRIVED_ROUND: arrived_round,
        ReplicaField.ARRIVED_INCARNATION: ticket[2],
        ReplicaField.ARRIVED_AT: now,
        ReplicaField.ARRIVALS: count,
    }
    keyed = {replica_key(replica, field): row for field, row in rows.items()}
    is_over = tf.logical_and(counted, tf.not_equal(arrived_round, ticket[1]))
    return table.write(keyed), tf.where(is_over, tf.zeros_like(count), count)


_ARRIVAL = (
    ReplicaField.ARRIVED_ROUND,
    ReplicaField.ARRIVED_INCARNATION,
    ReplicaField.ARRIVALS,
    ReplicaField.COUNTED,
    ReplicaField.COUNTED_ROUND,
)


@dataclass(frozen=True)
class _ArrivalRows:
    """What the table says of a replica's last arrival: the rows of _ARRIVAL, int64."""

    rows: tf.Tensor

    @property
    def counted_round(self) -> tf.Tensor:
        """The round in which its last accepted batch counted, int64 []."""
        return self.rows[4] - 1

    def counts(self, ticket: tf.Tensor) -> tf.Tensor:
        """Returns whether the ticket's batch has been accepted already, bool []."""
        is_seen = tf.logical_and(ticket[4] > 0, ticket[4] <= self.rows[3])
        return tf.logical_and(is_seen, self.rows[4] > 0)

    def count_of(self, ticket: tf.Tensor) -> tf.Tensor:
        """Counts gradients of a round and incarnation, this one included, int64 []."""
        is_same = tf.reduce_all(tf.equal(self.rows[:2], ticket[1:3]))
        return tf.where(is_same, self.rows[2], tf.zeros_like(self.rows[2])) + 1


def _local_variable(start: tf.Tensor, name: str) -> tf.Variable:
    return tf.compat.v1.Variable(
        start,
        trainable=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        name=name,
        use_resource=True,
    )

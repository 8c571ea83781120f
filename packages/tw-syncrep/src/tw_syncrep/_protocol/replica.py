"""A replica's step, and how it joins a run.

A step pushes the gradients, announces them, waits for the end of the round and pulls
parameters. A replica keeps its position and, on the worker, its copies of the
parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._parameters.cache import Pulling, cached_parameters
from tw_syncrep._parameters.packs import plan_packs
from tw_syncrep._parameters.placement import exact_device_scope
from tw_syncrep._protocol.graph import SyncState
from tw_syncrep._protocol.run_table import (
    REFUSED,
    TICKET_SIZE,
    ReplicaField,
    RunField,
    has_number,
    make_notice,
    make_ticket,
    run_mark,
    take_number,
)


@dataclass(frozen=True)
class Replica:
    """One replica's part of the graph."""

    index: int
    device: str
    position: tf.Variable  # local, int64 [2]: round and incarnation it computes for
    session: tf.Variable  # local, int64 []: 0 before it has joined
    stamp: tf.Tensor  # int64 []: its batch's number; by default, one never seen before
    local_step: tf.Variable  # its global step, under TensorFlow's name and dtype
    pulling: Pulling

    def continue_at(self, progress: tf.Tensor, *, joins: bool) -> tf.Tensor:
        """Records ``progress``, int64 [4], and pulls parameters, all on the worker."""
        with exact_device_scope(self.device):
            progress, pulled = self.pulling.pull(progress, is_published=not joins)
            step = tf.cast(progress[2], self.local_step.dtype)
            # Last: the watchdog reads it as a sign that everything has arrived.
            with tf.control_dependencies([pulled]):
                recorded = [
                    self.position.assign(progress[:2], read_value=False),
                    self.local_step.assign(step, read_value=False),
                ]
                if joins:
                    number = progress[3]
                    recorded.append(self.session.assign(number, read_value=False))
            with tf.control_dependencies(recorded):
                return tf.identity(progress, name="reply")


def make_replica(
    index: int,
    variables: Sequence[tf.Variable],
    *,
    device: str,
    step_dtype: tf.DType,
    name: str,
    below_bytes: int,
) -> Replica:
    """Makes the local state of a replica, detached, on its worker's device."""
    with tf.device(device):
        start = tf.zeros([2], tf.int64)
        position = _local_variable(start, f"{name}/replica_{index}/place")
        session = _local_variable(start[0], f"{name}/replica_{index}/session")
        unstamped = -tf.cast(tf.timestamp() * 1e6, tf.int64)
        stamp = tf.compat.v1.placeholder_with_default(unstamped, [], name="stamp")
        local_step = _local_variable(tf.zeros([], step_dtype), "sync_rep_local_step")
    names = {variable.name for variable in variables}
    cached = [found for found in cached_parameters() if found.master.name in names]
    masters = {n: found.master for n, found in enumerate(cached)}
    packs = plan_packs(masters, below_bytes=below_bytes)
    pulling = Pulling(tuple(cached), packs, f"{name}/published")
    return Replica(index, device, position, session, stamp, local_step, pulling)


def build_step(
    state: SyncState, replica: Replica, grads: Mapping[int, Any], weight: Any
) -> tf.Tensor:
    """Builds a replica's training step after its gradients; returns its reply."""
    ticket = make_ticket(
        replica.index,
        replica.position.read_value(),
        session=replica.session.read_value(),
        stamp=replica.stamp,
        weight=weight,
    )
    pushed = [queue.push(ticket, grads) for queue in state.gradient_queues]
    # A loop with even one remote input becomes a loop over the network: from here on,
    # the ticket is the one that the server has received.
    ticket, sent = state.arrivals.receive(ticket, grads)
    with exact_device_scope(state.table.device):
        with tf.control_dependencies(pushed):
            announced, count = _announce(state, replica.index, ticket, sent)
        with tf.control_dependencies([announced]):
            progress = state.wake_queues.wait(
                replica.index, ticket, count, quota=state.quota[replica.index]
            )
    return replica.continue_at(progress, joins=False)


def build_join(state: SyncState, replica: Replica, life: tf.Tensor) -> tf.Operation:
    """Returns the op with which a replica joins a run at its current round.

    It sets the local variable for the session to the new one's number, or to REFUSED.
    """
    table, own = state.table, replica.index
    latest = table.read_of(own, ReplicaField.SESSION, ReplicaField.COUNTED)
    now = table.now()
    number = table.now(above=tf.unstack(latest))
    is_own = has_number(table, own, life)
    # After a run closes, joiners belong to the next run.
    run = tf.reduce_sum(table.read([RunField.RUN, RunField.CLOSED]))
    rows = {
        ReplicaField.HEARD: now,
        ReplicaField.LEFT: 0,
        ReplicaField.JOINED: run_mark(run),
        ReplicaField.SESSION: number,
    }
    written = [table.write_of(own, rows, where=is_own), take_number(table, own, life)]
    with tf.control_dependencies(written):
        position = table.read([RunField.ROUND, RunField.INCARNATION])
        notified = state.arrivals.notify(own, position[1])
        # The chief may not have written the table's own step yet.
        step = tf.cast(state.global_step.read_value(), tf.int64)
        given = tf.where(is_own, number, REFUSED)
        progress = tf.concat([position, tf.stack([step, given])], axis=0)
    return tf.group(notified, replica.continue_at(progress, joins=True))


def _announce(
    state: SyncState, replica: int, ticket: tf.Tensor, sent: Sequence[tf.Tensor]
) -> tuple[tf.Operation, tf.Tensor]:
    """Returns the op that records an arrival, and ``WakeQueues.wait``'s ``count``.

    A batch that was accepted in a session that was lost does not arrive again: its
    replica waits for the end of that round, if it is still in progress.
    """
    table = state.table
    before = _ArrivalRows.of(table.read_of(replica, *_ARRIVAL), ticket)
    round_number, incarnation, counted = before.round, before.incarnation, before.counts
    notice = make_notice(replica, incarnation)
    sent_as = tf.raw_ops.Select(condition=counted, x=notice, y=ticket)
    # The ticket first: a replica killed in between has arrived, and is only reported
    # missing; in the other order, the chief would be blamed.
    with tf.control_dependencies([state.arrivals.enqueue(sent_as, sent)]):
        now = table.now()
    arrived_round = tf.where(counted, before.counted_round, round_number)
    count = before.count
    rows = {
        ReplicaField.HEARD: now,
        ReplicaField.ARRIVED_ROUND: arrived_round,
        ReplicaField.ARRIVED_INCARNATION: incarnation,
        ReplicaField.ARRIVED_AT: now,
        ReplicaField.ARRIVALS: count,
    }
    is_over = counted & tf.not_equal(arrived_round, round_number)
    written = [table.write_of(replica, rows)]
    if state.is_elastic:  # Rounds wait again for a replica that arrives.
        back, is_evicted = {ReplicaField.LEFT: 0}, before.is_evicted
        written.append(table.write_of(replica, back, where=is_evicted))
    return tf.group(*written), tf.where(is_over, tf.zeros_like(count), count)


_ARRIVAL = (
    ReplicaField.ARRIVED_ROUND,
    ReplicaField.ARRIVED_INCARNATION,
    ReplicaField.ARRIVALS,
    ReplicaField.COUNTED,
    ReplicaField.COUNTED_ROUND,
    ReplicaField.LEFT,
    ReplicaField.SESSION,
)


@dataclass(frozen=True)
class _ArrivalRows:
    """A replica's last arrival in the table, against a ticket; int64 and bool []."""

    round: tf.Tensor  # of the ticket
    incarnation: tf.Tensor  # of the ticket
    counts: tf.Tensor  # whether the ticket's batch has been accepted already
    counted_round: tf.Tensor  # the round in which its last accepted batch counted
    count: tf.Tensor  # number of gradients in the ticket's round, this one included
    is_evicted: tf.Tensor  # whether the ticket's session was evicted

    @classmethod
    def of(cls, rows: tf.Tensor, ticket: tf.Tensor) -> "_ArrivalRows":
        """Compares the rows of _ARRIVAL with a ticket."""
        # Cut once: each slice would be an op, and its bounds three more.
        _, round_, incarnation, session, stamp, _ = tf.unstack(ticket, num=TICKET_SIZE)
        last_round, last_incarnation, arrivals, stamp_then, counted, left, latest = (
            tf.unstack(rows)
        )
        is_seen = (stamp > 0) & (stamp <= stamp_then) & (counted > 0)
        is_same = tf.equal(last_round, round_) & tf.equal(last_incarnation, incarnation)
        count = arrivals * tf.cast(is_same, tf.int64) + 1
        is_evicted = (left < 0) & tf.equal(latest, session)
        return cls(round_, incarnation, is_seen, counted - 1, count, is_evicted)


def _local_variable(start: tf.Tensor, name: str) -> tf.Variable:
    return tf.compat.v1.Variable(
        start,
        trainable=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        name=name,
        use_resource=True,
    )

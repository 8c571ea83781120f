"""The chief's round: it decides which gradients count, adds them up and applies them.

The gradients of a round are chosen once, on one server, for all variables. Arrivals
share one queue. The chief accepts the first ones of the current round and incarnation,
at most ``quota[replica]`` from a replica, until it has as many as are needed, or as
many as the replicas that have not left can send. It adds each to the sum while it waits
for the next.

TensorFlow may drop the cancellation of a round whose session is gone. Such a round
ends by itself: when it takes a ticket that was made for a later incarnation, it puts it
back and fails. A round changes variables only if it holds the baton and the incarnation
is still its own. An incarnation also begins under the baton.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._protocol.graph import SyncState
from tw_syncrep._protocol.run_table import (
    NOTICE,
    TICKET_SIZE,
    ReplicaField,
    RunField,
    RunTable,
    replica_keys,
    ring_key,
    run_mark,
    weight_of,
)

Apply = Callable[[dict[int, Any]], Any]
"""Takes mean gradients by index; returns the op that has applied them."""


SUPERSEDED = "superseded by a later incarnation"
"""In the message of the ``InvalidArgumentError`` with which a fenced round fails."""


def build_round(
    state: SyncState, apply: Apply, publish: Callable[[tf.Operation], tf.Operation]
) -> tuple[tf.Operation, tf.Tensor]:
    """Builds the chief's round, and its incarnation's placeholder.

    Call it detached and on the table's device; the round runs on servers alone.
    """
    table = state.table
    now = table.read([RunField.ROUND, RunField.INCARNATION, RunField.RUN])
    own = tf.compat.v1.placeholder_with_default(now[1], [], name="incarnation")
    with tf.control_dependencies([_fence(tf.equal(own, now[1]))]):
        now = tf.identity(now)
    decision, tickets, sums = _decide(state, now)
    with tf.control_dependencies([decision.count]):
        baton = table.take_baton()
    with tf.control_dependencies([_begin_changes(table, decision, baton)]):
        tickets = [tf.identity(accepted) for accepted in tickets]
        count = tf.cast(decision.count, tf.int32)
        means = state.arrivals.payload.means(sums, count)
    for queue in state.gradient_queues:
        means |= queue.mean_of(tickets[0])
    # Some optimizers begin before they have their gradients, as Adam does by
    # decaying the moments of sparse ones; a checkpoint must not catch that.
    with tf.control_dependencies([count]):
        applied = publish(tf.group(apply(means)))
    with tf.control_dependencies([applied]):
        rows = [
            (RunField.ROUND, decision.round + 1),
            (RunField.STEP, state.global_step.read_value()),
            (RunField.CHANGING, 0),
            (ring_key(decision.round), table.now()),
        ]
        written = table.write(rows)
    given_back = table.give_back(baton, after=[written])
    with tf.control_dependencies([given_back]):
        return state.wake_queues.end_round(), own


def _fence(is_own: tf.Tensor) -> tf.Operation:
    """Returns the op that fails unless the incarnation is the round's own."""
    # One op; ``tf.debugging.Assert`` would build a conditional.
    told = tf.constant(f"This round was {SUPERSEDED}.")
    return tf.raw_ops.Assert(condition=is_own, data=[told])


@dataclass(frozen=True)
class _Decision:
    """The choice of gradients for a round; int64 tensors."""

    round: tf.Tensor
    incarnation: tf.Tensor
    count: tf.Tensor  # [] gradients accepted, at least 1
    filled: tf.Tensor  # [R] gradients accepted from each replica
    stamps: tf.Tensor  # [R] each replica's last accepted batch
    dropped: tf.Tensor  # [] gradients that arrived too late or were one too many


def _begin_changes(
    table: RunTable, decision: _Decision, baton: tf.Tensor
) -> tf.Operation:
    """Returns the op after which a round may change variables, recorded in the table.

    The accepted batches are recorded now: if the round is cut off, they have counted.
    """
    replicas = decision.filled.shape[0]
    counted_keys = replica_keys(replicas, ReplicaField.COUNTED)
    round_keys = replica_keys(replicas, ReplicaField.COUNTED_ROUND)
    with tf.control_dependencies([baton]):
        found = table.read([RunField.INCARNATION, RunField.DROPPED, *round_keys])
    with tf.control_dependencies([_fence(tf.equal(found[0], decision.incarnation))]):
        has_come = decision.filled > 0
        return table.write(
            [
                (RunField.CHANGING, decision.round + 1),
                (RunField.DROPPED, found[1] + decision.dropped),
                (counted_keys, decision.stamps),
                (round_keys, tf.where(has_come, decision.round + 1, found[2:])),
            ]
        )


def _decide(
    state: SyncState, now: tf.Tensor
) -> tuple[_Decision, list[tf.Tensor], list[tf.Tensor]]:
    """Waits for a round's gradients; returns the choice, tickets if kept, and sums."""
    payload, keeps_tickets = state.arrivals.payload, bool(state.gradient_queues)
    slots = tf.constant(state.quota, tf.int64)
    round_number, incarnation, run = tf.unstack(now)
    selection = _Selection(
        state, round_number, incarnation, slots, left_mark=run_mark(run)
    )
    tickets = [tf.zeros([0, TICKET_SIZE], tf.int64)] * keeps_tickets
    start = selection.start()
    count, filled, stamps, _, dropped, is_superseded, *rest = tf.while_loop(
        selection.wants_more,
        selection.take_next,
        [*start, *tickets, *payload.zeros()],
        shape_invariants=[
            *(tensor.shape for tensor in start),
            *(tf.TensorShape([None, TICKET_SIZE]) for _ in tickets),
            *payload.sum_shapes(),
        ],
        parallel_iterations=1,
    )
    with tf.control_dependencies([_fence(tf.logical_not(is_superseded))]):
        count = tf.identity(count)
    decision = _Decision(round_number, incarnation, count, filled, stamps, dropped)
    return decision, rest[: len(tickets)], rest[len(tickets) :]


@dataclass(frozen=True)
class _Selection:
    """Accepts or drops arrivals one by one; its methods are those of the loop."""

    state: SyncState
    round: tf.Tensor
    incarnation: tf.Tensor
    slots: tf.Tensor  # int64 [R], gradients that each replica may send
    left_mark: tf.Tensor  # int64 [], of replicas that left; negative if evicted

    def start(self) -> list[tf.Tensor]:
        """Returns the loop's variables.

        They are the count, slots filled [R], stamps of the last accepted batches [R],
        replicas that left, bool [R], dropped, and whether this round is superseded.
        """
        nothing = tf.constant(0, tf.int64)
        filled = tf.zeros([self.state.replicas], tf.int64)
        replicas = self.state.replicas
        [stamps] = self.state.table.read_fields(replicas, ReplicaField.COUNTED)
        return [nothing, filled, stamps, self._find_left(), nothing, tf.constant(False)]

    def wants_more(
        self,
        count: tf.Tensor,
        filled: tf.Tensor,
        _: tf.Tensor,
        left: tf.Tensor,
        dropped: tf.Tensor,
        is_superseded: tf.Tensor,
        *rest: tf.Tensor,
    ) -> tf.Tensor:
        """Returns whether more gradients are needed and possible, bool []."""
        possible = tf.reduce_sum(
            tf.raw_ops.Select(condition=left, x=filled, y=self.slots)
        )
        is_short = count < tf.clip_by_value(possible, 1, self.state.aggregate)
        return tf.logical_and(is_short, tf.logical_not(is_superseded))

    def take_next(
        self,
        count: tf.Tensor,
        filled: tf.Tensor,
        stamps: tf.Tensor,
        left: tf.Tensor,
        dropped: tf.Tensor,
        is_superseded: tf.Tensor,
        *rest: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Waits for an arrival; returns the loop's variables after it."""
        ticket, *sent = self.state.arrivals.dequeue()
        replica, round_, incarnation, _, stamp, _ = tf.unstack(ticket, num=TICKET_SIZE)
        so_far = tf.gather(tf.stack([stamps, filled, self.slots]), replica, axis=1)
        last_stamp, used, slots = tf.unstack(so_far)
        is_new = (stamp < 0) | (stamp > last_stamp)
        is_current = tf.equal(round_, self.round)
        is_current &= tf.equal(incarnation, self.incarnation)
        is_accepted = is_current & (used < slots) & is_new
        accepted = tf.cast(is_accepted, tf.int64)
        is_gradient = tf.not_equal(round_, NOTICE) & is_new
        slot = tf.one_hot(replica, self.state.replicas, dtype=tf.int64) * accepted
        is_superseded, left, *added = self._add_if(
            is_accepted, left, rest, ticket, sent
        )
        return [
            count + accepted,
            filled + slot,
            stamps + slot * tf.maximum(stamp - last_stamp, 0),
            left,
            dropped + tf.cast(is_gradient, tf.int64) - accepted,
            is_superseded,
            *added,
        ]

    def _add_if(
        self,
        is_accepted: tf.Tensor,
        left: tf.Tensor,
        so_far: Sequence[tf.Tensor],
        ticket: tf.Tensor,
        sent: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Adds an arrival to the tickets, if they are kept, and to the sums.

        An arrival for a later incarnation is put back: its own chief waits for it.
        If nothing is added, LEFT is read again: a replica that leaves or joins writes
        to the table first, then sends a notice, which is never accepted. Returns
        whether the arrival was put back, LEFT, tickets and sums.
        """
        arrivals, kept = self.state.arrivals, int(bool(self.state.gradient_queues))

        def add() -> list[tf.Tensor]:
            more = [tf.concat([t, ticket[tf.newaxis]], axis=0) for t in so_far[:kept]]
            weight = weight_of(ticket)
            sums = arrivals.payload.add(so_far[kept:], sent, weight)
            return [tf.constant(False), left, *more, *sums]

        def put_back() -> tf.Tensor:
            with tf.control_dependencies([arrivals.enqueue(ticket, sent)]):
                return tf.constant(True)

        def leave() -> list[tf.Tensor]:
            is_later = ticket[2] > self.incarnation
            went_back = tf.cond(is_later, put_back, lambda: tf.constant(False))
            return [went_back, self._find_left(), *so_far]

        return list(tf.cond(is_accepted, add, leave))

    def _find_left(self) -> tf.Tensor:
        replicas = self.state.replicas
        [marks] = self.state.table.read_fields(replicas, ReplicaField.LEFT)
        return tf.equal(tf.abs(marks), self.left_mark)

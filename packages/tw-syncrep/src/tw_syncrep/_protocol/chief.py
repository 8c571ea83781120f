"""What the chief does: it opens a run, and decides, adds up and applies each round.

Whose gradients make up a round is decided once, on one server, for all variables.
Arrivals come in one queue. The chief accepts the first ones of the current round and
incarnation, at most ``quota[replica]`` from a replica, until it has as many as are
asked for, or as many as the replicas that have not left can bring. It adds up what
it has while it waits for the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_syncrep._exact_device_scope import detached_scope, exact_device_scope
from tw_syncrep._protocol.graph import SyncState, share_initial_tokens
from tw_syncrep._protocol.run_table import (
    NOTICE,
    TICKET_SIZE,
    ReplicaField,
    RunField,
    replica_keys,
    ring_key,
    run_mark,
)

Apply = Callable[[dict[int, Any]], Any]
"""Takes mean gradients by index; returns the op that has applied them."""


def build_round(
    state: SyncState, apply: Apply, *, global_step: tf.Variable
) -> tf.Operation:
    """Builds one round of the chief.

    Args:
      state: where the gradients are.
      apply: called once, while the graph is built.
      global_step: that it increases.

    Returns:
      The op that waits for a round's gradients, applies their mean and wakes
      the replicas. It runs on the parameter servers alone.
    """
    table = state.table
    with detached_scope(), exact_device_scope(table.device):
        dropped_before = table.read([RunField.DROPPED])[0]
        decided, count, dropped, tickets, sums = _decide(state)
        means = state.arrivals.payload.means(sums, count)
        for queue in state.gradient_queues:
            means |= queue.mean_of(tickets)
        # Some optimizers begin without their gradients, as Adam does by decaying
        # the moments of sparse ones; a checkpoint must not catch that.
        with tf.control_dependencies([count]):
            applied = apply(means)
        with tf.control_dependencies([applied]):
            rows = [
                (RunField.ROUND, decided + 1),
                (RunField.STEP, global_step.read_value()),
                (RunField.DROPPED, dropped_before + dropped),
                (ring_key(decided), table.now()),
            ]
            written = table.write(rows)
        with tf.control_dependencies([written]):
            return state.wake_queues.end_round()


def build_open(
    state: SyncState,
    chief: int,
    *,
    initial: tf.Tensor,
    global_step: tf.Variable,
    join: Callable[[], tf.Operation],
) -> tf.Operation:
    """Returns the op that begins an incarnation, and a run where the last has ended.

    Nothing that was interrupted before reaches into the incarnation. Initial tokens
    are written with it, as replicas begin their steps when they see it.

    Args:
      state: of the optimizer.
      chief: its number among the replicas.
      initial: int64 [R], initial tokens of each replica.
      global_step: what the incarnation continues with.
      join: returns the op with which the chief, a replica itself, joins.
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
                RunField.CHIEF: chief,
                RunField.FIRST_ROUND: before[0],
                RunField.RUN: before[1] + before[2],
                RunField.STEP: step,
                RunField.FIRST_STEP: step,
                **_initial_rows(initial, state.replicas),
            }
        )
    with tf.control_dependencies([opened]):
        return tf.group(state.wake_queues.wake_all(), join())


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


def _decide(state: SyncState) -> tuple[Any, ...]:
    """Waits until the gradients of a round have arrived.

    Returns:
      round: int64 [], the round that is decided.
      count: int32 [], gradients accepted, at least 1.
      dropped: int64 [], gradients that came too late or were one too many.
      tickets: int64 [count, TICKET_SIZE], accepted, in order of arrival; None where
        no other server needs them.
      sums: of the accepted payloads.
    """
    payload, keeps_tickets = state.arrivals.payload, bool(state.gradient_queues)
    now = state.table.read([RunField.ROUND, RunField.INCARNATION, RunField.RUN])
    slots = tf.constant(state.quota, tf.int64)
    selection = _Selection(state, now[:2], slots, left_mark=run_mark(now[2]))
    tickets = [tf.zeros([0, TICKET_SIZE], tf.int64)] * keeps_tickets
    start = selection.start()
    count, _, _, dropped, *rest = tf.while_loop(
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
    count = tf.cast(count, tf.int32)
    kept = rest[0] if keeps_tickets else None
    return now[0], count, dropped, kept, rest[len(tickets) :]


@dataclass(frozen=True)
class _Selection:
    """Accepts or drops one arrival after the other; its methods are the loop's.

    Attributes:
      state: where arrivals come from.
      position: int64 [2], the round and incarnation that are decided.
      slots: int64 [R], how many gradients each replica may bring.
      left_mark: int64 [], marks who has left this run.
    """

    state: SyncState
    position: tf.Tensor
    slots: tf.Tensor
    left_mark: tf.Tensor

    def start(self) -> list[tf.Tensor]:
        """Returns count, slots filled [R], marks of left [R], and dropped; int64."""
        nothing = tf.constant(0, tf.int64)
        filled = tf.zeros([self.state.replicas], tf.int64)
        return [nothing, filled, self._read_left(), nothing]

    def wants_more(
        self, count: tf.Tensor, filled: tf.Tensor, left: tf.Tensor, *_: tf.Tensor
    ) -> tf.Tensor:
        """Returns whether more gradients are asked for and possible, bool []."""
        has_left = tf.equal(left, self.left_mark)
        possible = tf.reduce_sum(tf.where(has_left, filled, self.slots))
        return count < tf.clip_by_value(possible, 1, self.state.aggregate)

    def take_next(
        self,
        count: tf.Tensor,
        filled: tf.Tensor,
        _: tf.Tensor,
        dropped: tf.Tensor,
        *rest: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Waits for an arrival; returns the loop's variables with it."""
        ticket, *sent = self.state.arrivals.dequeue()
        with tf.control_dependencies([ticket]):
            left = self._read_left()
        is_accepted = self._accepts(ticket, filled)
        accepted = tf.cast(is_accepted, tf.int64)
        is_gradient = tf.cast(tf.not_equal(ticket[1], NOTICE), tf.int64)
        slot = tf.one_hot(ticket[0], self.state.replicas, dtype=tf.int64)
        return [
            count + accepted,
            filled + accepted * slot,
            left,
            dropped + is_gradient - accepted,
            *self._add_if(is_accepted, rest, ticket, sent),
        ]

    def _accepts(self, ticket: tf.Tensor, filled: tf.Tensor) -> tf.Tensor:
        is_current = tf.reduce_all(tf.equal(ticket[1:3], self.position))
        has_slot = tf.gather(filled, ticket[0]) < tf.gather(self.slots, ticket[0])
        return tf.logical_and(is_current, has_slot)

    def _add_if(
        self,
        is_accepted: tf.Tensor,
        so_far: Sequence[tf.Tensor],
        ticket: tf.Tensor,
        sent: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Adds an arrival to the tickets, if they are kept, and to the sums."""
        if not so_far:
            return []
        kept = int(bool(self.state.gradient_queues))

        def add() -> list[tf.Tensor]:
            more = [tf.concat([t, ticket[tf.newaxis]], axis=0) for t in so_far[:kept]]
            return more + self.state.arrivals.payload.add(so_far[kept:], sent)

        added = tf.cond(is_accepted, add, lambda: list(so_far))
        return list(added) if isinstance(added, list | tuple) else [added]

    def _read_left(self) -> tf.Tensor:
        keys = replica_keys(self.state.replicas, ReplicaField.LEFT)
        return self.state.table.read(keys)


def _initial_rows(initial: tf.Tensor, replicas: int) -> dict[Any, Any]:
    """Returns the table's rows for each replica's initial tokens, int64 [R]."""
    keys = replica_keys(replicas, ReplicaField.INITIAL)
    return dict(zip(keys, tf.unstack(initial, replicas), strict=True))

"""Whose gradients make up a round: decided once, on one server, for all variables.

Arrivals come in one queue: a ticket, and with it what the replica sends to this
server. The chief accepts the first ones of the present round and epoch, at most
``quota[replica]`` from a replica, until it has as many as are asked for, or as
many as the replicas that have not left can bring. It adds up while it waits for
the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tw_syncrep._exact_device_scope import on_device
from tw_syncrep._protocol.run_table import (
    Board,
    Field,
    ReplicaField,
    mark,
    replica_keys,
)
from tw_syncrep._protocol.ticket import NOTICE, TICKET_SIZE
from tw_syncrep._transfer.payload import Payload


@dataclass(frozen=True)
class Arrivals:
    """Where replicas announce themselves, on the board's server.

    Attributes:
      board: of the optimizer.
      queue: elements are a ticket and the payload.
      payload: what replicas send to this server.
      quota: [R] slots that each replica may fill.
      aggregate: how many gradients are asked for.
      keeps_tickets: whether other servers must be told who was accepted.
    """

    board: Board
    queue: tf.queue.QueueBase
    payload: Payload
    quota: Sequence[int]
    aggregate: int
    keeps_tickets: bool


@dataclass(frozen=True)
class Decision:
    """What a round consists of.

    Attributes:
      count: int32 [], gradients accepted, at least 1.
      tickets: int64 [count, TICKET_SIZE], in order of arrival, if they are kept.
      dropped: int64 [], gradients that came too late or were one too many.
      round_number: int64 [].
      sums: of the accepted payloads.
    """

    count: tf.Tensor
    tickets: tf.Tensor | None
    dropped: tf.Tensor
    round_number: tf.Tensor
    sums: Sequence[tf.Tensor]


def quotas(aggregate: int, total: int) -> tuple[int, ...]:
    """Shares out the slots of a round.

    Args:
      aggregate: gradients that make a step.
      total: replicas.

    Returns:
      [total] slots that each replica may fill: 1 where there are replicas
      enough, else ``aggregate`` in total, as even as can be.
    """
    if total >= aggregate:
        return (1,) * total
    share, more = divmod(aggregate, total)
    return tuple(share + (replica < more) for replica in range(total))


def decide(arrivals: Arrivals) -> Decision:
    """Waits until the gradients of a round have arrived.

    Returns:
      The decision, on the board's server.
    """
    with on_device(arrivals.board.device):
        now = arrivals.board.read([Field.ROUND, Field.EPOCH, Field.RUN])
        slots = tf.constant(arrivals.quota, tf.int64)
        judge = _Judge(arrivals, now[:2], slots, gone=mark(now[2]))
        tickets = [tf.zeros([0, TICKET_SIZE], tf.int64)] * arrivals.keeps_tickets
        start = judge.start()
        count, _, _, dropped, *rest = tf.while_loop(
            judge.wants_more,
            judge.hear_next,
            [*start, *tickets, *arrivals.payload.start()],
            shape_invariants=[
                *(tensor.shape for tensor in start),
                *(tf.TensorShape([None, TICKET_SIZE]) for _ in tickets),
                *arrivals.payload.sum_shapes(),
            ],
            parallel_iterations=1,
        )
        kept = rest[0] if arrivals.keeps_tickets else None
        sums = rest[len(tickets) :]
        return Decision(tf.cast(count, tf.int32), kept, dropped, now[0], sums)


@dataclass(frozen=True)
class _Judge:
    """Judges one arrival after the other; its methods are the loop's.

    Attributes:
      arrivals: where they come from.
      now: int64 [2], the round and epoch that are decided.
      slots: int64 [R], how many gradients each replica may bring.
      gone: int64 [], marks who has left this run.
    """

    arrivals: Arrivals
    now: tf.Tensor
    slots: tf.Tensor
    gone: tf.Tensor

    def start(self) -> list[tf.Tensor]:
        """Returns count, slots filled [R], marks of left [R], and dropped; int64."""
        nothing = tf.constant(0, tf.int64)
        filled = tf.zeros([len(self.arrivals.quota)], tf.int64)
        return [nothing, filled, self._read_left(), nothing]

    def wants_more(
        self, count: tf.Tensor, filled: tf.Tensor, left: tf.Tensor, *_: tf.Tensor
    ) -> tf.Tensor:
        """Tells whether more gradients are asked for and possible, bool []."""
        has_left = tf.equal(left, self.gone)
        possible = tf.reduce_sum(tf.where(has_left, filled, self.slots))
        return count < tf.clip_by_value(possible, 1, self.arrivals.aggregate)

    def hear_next(
        self,
        count: tf.Tensor,
        filled: tf.Tensor,
        _: tf.Tensor,
        dropped: tf.Tensor,
        *rest: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Waits for an arrival; returns the state with it."""
        ticket, *sent = _next(self.arrivals)
        with tf.control_dependencies([ticket]):
            left = self._read_left()
        is_accepted = _is_accepted(ticket, self.now, filled, self.slots)
        accepted = tf.cast(is_accepted, tf.int64)
        is_gradient = tf.cast(tf.not_equal(ticket[1], NOTICE), tf.int64)
        slot = tf.one_hot(ticket[0], len(self.arrivals.quota), dtype=tf.int64)
        return [
            count + accepted,
            filled + accepted * slot,
            left,
            dropped + is_gradient - accepted,
            *_add_if(is_accepted, self.arrivals, rest, [ticket, *sent]),
        ]

    def _read_left(self) -> tf.Tensor:
        replicas = len(self.arrivals.quota)
        return self.arrivals.board.read(replica_keys(replicas, ReplicaField.LEFT))


def _next(arrivals: Arrivals) -> list[tf.Tensor]:
    element = arrivals.queue.dequeue()
    element = [element] if isinstance(element, tf.Tensor) else list(element)
    element[0].set_shape([TICKET_SIZE])
    return element


def _is_accepted(
    ticket: tf.Tensor, now: tf.Tensor, filled: tf.Tensor, slots: tf.Tensor
) -> tf.Tensor:
    is_current = tf.reduce_all(tf.equal(ticket[1:3], now))
    has_slot = tf.gather(filled, ticket[0]) < tf.gather(slots, ticket[0])
    return tf.logical_and(is_current, has_slot)


def _add_if(
    is_accepted: tf.Tensor,
    arrivals: Arrivals,
    so_far: Sequence[tf.Tensor],
    element: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Adds an element to the tickets, if they are kept, and to the sums."""
    if not so_far:
        return []
    ticket, *sent = element
    kept = int(arrivals.keeps_tickets)

    def add() -> list[tf.Tensor]:
        more = [tf.concat([t, ticket[tf.newaxis]], axis=0) for t in so_far[:kept]]
        return more + arrivals.payload.add(so_far[kept:], sent)

    added = tf.cond(is_accepted, add, lambda: list(so_far))
    return list(added) if isinstance(added, list | tuple) else [added]

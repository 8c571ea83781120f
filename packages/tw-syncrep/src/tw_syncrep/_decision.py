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

from tw_syncrep._board import Board, Field, ReplicaField, replica_keys
from tw_syncrep._on_device import on_device
from tw_syncrep._payload import Payload
from tw_syncrep._ticket import NOTICE, TICKET_SIZE


@dataclass(frozen=True)
class Arrivals:
    """Where replicas announce themselves, on the board's server.

    Attributes:
      board: of the optimizer.
      queue: elements are a ticket and the payload.
      payload: what replicas send to this server.
      quota: [R] slots that each replica may fill.
      aggregate: how many gradients are asked for.
    """

    board: Board
    queue: tf.queue.QueueBase
    payload: Payload
    quota: Sequence[int]
    aggregate: int


@dataclass(frozen=True)
class Decision:
    """What a round consists of.

    Attributes:
      tickets: int64 [C, TICKET_SIZE], C >= 1, accepted, in order of arrival.
      dropped: int64 [], gradients that came too late or were one too many.
      round_number: int64 [].
      sums: of the accepted payloads.
    """

    tickets: tf.Tensor
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
    replicas = len(arrivals.quota)
    absent = replica_keys(replicas, ReplicaField.LEFT)
    with on_device(arrivals.board.device):
        now = arrivals.board.read([Field.ROUND, Field.EPOCH])
        slots = tf.constant(arrivals.quota, tf.int64)

        def go_on(
            tickets: tf.Tensor, filled: tf.Tensor, left: tf.Tensor, *_: tf.Tensor
        ) -> tf.Tensor:
            possible = tf.reduce_sum(tf.where(left > 0, filled, slots))
            needed = tf.clip_by_value(possible, 1, arrivals.aggregate)
            return tf.shape(tickets, tf.int64)[0] < needed

        def judge(
            tickets: tf.Tensor,
            filled: tf.Tensor,
            _: tf.Tensor,
            dropped: tf.Tensor,
            *sums: tf.Tensor,
        ) -> list[tf.Tensor]:
            ticket, *sent = _next(arrivals)
            with tf.control_dependencies([ticket]):
                left = arrivals.board.read(absent)
            is_accepted = _is_accepted(ticket, now, filled, slots)
            accepted = tf.cast(is_accepted, tf.int64)
            is_gradient = tf.cast(tf.not_equal(ticket[1], NOTICE), tf.int64)
            slot = accepted * tf.one_hot(ticket[0], replicas, dtype=tf.int64)
            return [
                tf.concat([tickets, ticket[tf.newaxis][:accepted]], axis=0),
                filled + slot,
                left,
                dropped + is_gradient * (1 - accepted),
                *_add_if(is_accepted, arrivals.payload, sums, sent),
            ]

        start = [
            tf.zeros([0, TICKET_SIZE], tf.int64),
            tf.zeros([replicas], tf.int64),
            arrivals.board.read(absent),
            tf.constant(0, tf.int64),
        ]
        shapes = [
            tf.TensorShape([None, TICKET_SIZE]),
            *(tensor.shape for tensor in start[1:]),
        ]
        tickets, _, _, dropped, *sums = tf.while_loop(
            go_on,
            judge,
            [*start, *arrivals.payload.start()],
            shape_invariants=[*shapes, *arrivals.payload.sum_shapes()],
            parallel_iterations=1,
        )
        return Decision(tickets, dropped, now[0], sums)


def _next(arrivals: Arrivals) -> list[tf.Tensor]:
    element = arrivals.queue.dequeue()
    element = [element] if isinstance(element, tf.Tensor) else list(element)
    element[0].set_shape([TICKET_SIZE])
    return element


def _is_accepted(
    ticket: tf.Tensor, now: tf.Tensor, filled: tf.Tensor, slots: tf.Tensor
) -> tf.Tensor:
    is_current = tf.reduce_all(tf.equal(ticket[1:3], now))
    return tf.logical_and(is_current, filled[ticket[0]] < slots[ticket[0]])


def _add_if(
    is_accepted: tf.Tensor,
    payload: Payload,
    sums: Sequence[tf.Tensor],
    sent: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    if not sums:
        return []
    added = tf.cond(is_accepted, lambda: payload.add(sums, sent), lambda: list(sums))
    return list(added) if isinstance(added, list | tuple) else [added]

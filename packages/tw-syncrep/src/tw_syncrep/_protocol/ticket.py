"""Tickets: which replica computed a gradient, when, and which one it is.

The last number is the worker's clock, so that two pushes of one replica in one
round, as a restarted worker makes them, have different tickets.
"""

from typing import Any

import tensorflow as tf

TICKET_SIZE = 4
NOTICE = -1
"""Round of a ticket that carries no gradient: look at the board again."""


def make_ticket(replica: int, place: tf.Tensor) -> tf.Tensor:
    """Makes a ticket on the worker.

    Args:
      replica: number of the replica.
      place: int64 [2], round and epoch for which it computed.

    Returns:
      int64 [TICKET_SIZE]: replica, round, epoch, the worker's time.
    """
    own = tf.constant([replica], tf.int64)
    stamp = tf.bitcast(tf.reshape(tf.timestamp(), [1]), tf.int64)
    return tf.concat([own, place, stamp], axis=0)


def make_notice(replica: int) -> tf.Tensor:
    """Makes a ticket that only wakes the chief up."""
    return tf.constant([replica, NOTICE, NOTICE, NOTICE], tf.int64)


def is_among(ticket: tf.Tensor, tickets: tf.Tensor) -> Any:
    """Tells whether a ticket is one of [C, TICKET_SIZE] tickets, bool []."""
    return tf.reduce_any(tf.reduce_all(tf.equal(ticket, tickets), axis=1))
